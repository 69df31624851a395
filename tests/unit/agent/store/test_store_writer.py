"""A node's decisions reach the store: together where they can, each with its own outcome."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.agent.store.store_writer import StoreWriter
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Denied, Unavailable, WeftError
from weft.domain.ids import StoreKey
from weft.domain.store_types import NEVER, Compare, Put, Revision, RevisionEquals, Write
from weft.domain.transaction import ReadSet, Transaction
from weft.lab.waiting import soon, until
from weft.runtime.store.mirror import follow

# It holds as long as nobody puts the key.
FENCE = RevisionEquals(StoreKey("alive/nodes/n1"), NEVER)


def key(name: str) -> StoreKey:
    return StoreKey(f"status/nodes/n1/{name}")


class Watched(MemoryStore):
    """A store that keeps what was committed, may be slow, and may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[list[StoreKey]] = []
        self.goes = asyncio.Event()
        self.goes.set()
        self.error: WeftError | None = None

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        keys = [write.key for write in writes if isinstance(write, Put)]
        self.commits.append(keys)
        await self.goes.wait()
        if self.error is not None:
            raise self.error
        if key("forbidden") in keys:
            raise Denied("not its own")
        return await super().commit(compares, writes)


def write(*names: str, when: RevisionEquals | None = None, reading: ReadSet) -> tuple[str, Transaction]:
    """A decision that writes keys, if one of them is as expected."""
    if when is not None:
        reading.at(when.key, when.revision)
    return names[0], reading.plan([Put(key(name), b"{}") for name in names])


@asynccontextmanager
async def decisions(store: Watched) -> AsyncIterator[StoreWriter]:
    """In touch while the block runs."""
    cluster = Cluster()
    async with store, follow(store, cluster) as mirror:
        made = StoreWriter(store, cluster=cluster, mirror=mirror)
        running = asyncio.create_task(made.run(FENCE))
        await until(lambda: made.possible)
        try:
            yield made
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, Unavailable):
                await running


async def carry_out_behind(store: Watched, made: StoreWriter, *asked: partial[tuple[str, Transaction]]) -> list[object]:
    """Ask for some while another is under way; their outcomes."""
    store.goes.clear()
    first = asyncio.ensure_future(made.carry_out(partial(_named, partial(write, "first"))))
    await until(lambda: bool(store.commits))
    others = [asyncio.ensure_future(made.carry_out(partial(_named, each))) for each in asked]
    await asyncio.sleep(0)
    store.goes.set()
    await soon(first)
    return await soon(asyncio.gather(*others, return_exceptions=True))


def _named(decide: partial[tuple[str, Transaction]], reading: ReadSet) -> tuple[str, Transaction]:
    return decide(reading=reading)


async def test_those_that_wait_together_share_a_commit() -> None:
    store = Watched()
    async with decisions(store) as made:
        outcomes = await carry_out_behind(store, made, *(partial(write, name) for name in "abc"))
        assert outcomes == ["a", "b", "c"]
        assert store.commits == [[key("first")], [key("a"), key("b"), key("c")]]


async def test_two_that_write_the_same_are_committed_one_after_the_other() -> None:
    store = Watched()
    async with decisions(store) as made:
        outcomes = await carry_out_behind(store, made, partial(write, "a"), partial(write, "b"), partial(write, "a"))
        assert outcomes == ["a", "b", "a"]
        assert store.commits[1:] == [[key("a"), key("b")], [key("a")]]


async def test_a_decision_that_cannot_be_taken_does_not_harm_the_others() -> None:
    def refuse(*, reading: ReadSet) -> tuple[str, Transaction]:
        raise Conflict("it is taken")

    store = Watched()
    async with decisions(store) as made:
        good, bad, other = await carry_out_behind(
            store, made, partial(write, "a"), partial(refuse), partial(write, "b")
        )
        assert (good, other) == ("a", "b")
        assert isinstance(bad, Conflict)


async def test_when_a_shared_commit_fails_its_members_are_tried_singly() -> None:
    """One that is refused must not fail the others."""
    store = Watched()
    async with decisions(store) as made:
        good, bad, other = await carry_out_behind(
            store, made, partial(write, "a"), partial(write, "forbidden"), partial(write, "b")
        )
        assert (good, other) == ("a", "b")
        assert isinstance(bad, Denied)
        assert store.commits[1:] == [[key("a"), key("forbidden"), key("b")], [key("a")], [key("forbidden")], [key("b")]]


async def test_one_that_stays_stale_ends_with_unavailable_and_the_others_are_carried_out() -> None:
    store = Watched()
    async with decisions(store) as made:
        never = RevisionEquals(key("absent"), 7)
        good, bad = await carry_out_behind(store, made, partial(write, "a"), partial(write, "c", when=never))
        assert good == "a"
        assert isinstance(bad, Unavailable)


async def test_after_an_unknown_outcome_nothing_more_is_committed() -> None:
    """Whoever waits is told, and whoever comes later too, until we are in touch again."""
    store = Watched()
    async with decisions(store) as made:
        store.error = Unavailable("the store did not answer")
        waiting = [asyncio.ensure_future(made.carry_out(partial(_named, partial(write, name)))) for name in "ab"]
        for outcome in await soon(asyncio.gather(*waiting, return_exceptions=True)):
            assert isinstance(outcome, Unavailable)
        assert not made.possible
        with pytest.raises(Unavailable):
            await made.carry_out(partial(_named, partial(write, "c")))
        assert len(store.commits) == 1


async def test_what_was_given_up_by_its_asker_is_carried_out_all_the_same() -> None:
    store = Watched()
    async with decisions(store) as made:
        store.goes.clear()
        asked = asyncio.ensure_future(made.carry_out(partial(_named, partial(write, "a"))))
        await until(lambda: bool(store.commits))
        asked.cancel()
        store.goes.set()
        assert await soon(made.carry_out(partial(_named, partial(write, "b")))) == "b"
        assert await store.read(key("a")) is not None
