"""Writes of a node: merged into one commit where possible, each with its own result."""

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

# It holds as long as the key does not exist.
FENCE = RevisionEquals(StoreKey("alive/nodes/n1"), NEVER)


def key(name: str) -> StoreKey:
    return StoreKey(f"status/nodes/n1/{name}")


class RecordingStore(MemoryStore):
    """A store that records commits, and may be slow or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.commits: list[list[StoreKey]] = []
        self.released = asyncio.Event()
        self.released.set()
        self.error: WeftError | None = None

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        keys = [write.key for write in writes if isinstance(write, Put)]
        self.commits.append(keys)
        await self.released.wait()
        if self.error is not None:
            raise self.error
        if key("forbidden") in keys:
            raise Denied("not its own")
        return await super().commit(compares, writes)


def plan_put(*names: str, when: RevisionEquals | None = None, reading: ReadSet) -> tuple[str, Transaction]:
    """Put keys, if one of them is as expected."""
    if when is not None:
        reading.compare_revision(when.key, when.revision)
    return names[0], reading.plan([Put(key(name), b"{}") for name in names])


@asynccontextmanager
async def writing(store: RecordingStore) -> AsyncIterator[StoreWriter]:
    """A session while the block runs."""
    cluster = Cluster()
    async with store, follow(store, cluster) as mirror:
        writer = StoreWriter(store, cluster=cluster, mirror=mirror)
        running = asyncio.create_task(writer.run(FENCE))
        await until(lambda: writer.connected)
        try:
            yield writer
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError, Unavailable):
                await running


async def write_behind(
    store: RecordingStore, writer: StoreWriter, *plans: partial[tuple[str, Transaction]]
) -> list[object]:
    """Write some while another commit is under way; their results."""
    store.released.clear()
    first = asyncio.ensure_future(writer.write(partial(_named, partial(plan_put, "first"))))
    await until(lambda: bool(store.commits))
    others = [asyncio.ensure_future(writer.write(partial(_named, plan))) for plan in plans]
    await asyncio.sleep(0)
    store.released.set()
    await soon(first)
    return await soon(asyncio.gather(*others, return_exceptions=True))


def _named(plan: partial[tuple[str, Transaction]], reading: ReadSet) -> tuple[str, Transaction]:
    return plan(reading=reading)


async def test_pending_writes_share_a_commit() -> None:
    store = RecordingStore()
    async with writing(store) as writer:
        results = await write_behind(store, writer, *(partial(plan_put, name) for name in "abc"))
        assert results == ["a", "b", "c"]
        assert store.commits == [[key("first")], [key("a"), key("b"), key("c")]]


async def test_writes_of_the_same_key_are_committed_one_after_the_other() -> None:
    store = RecordingStore()
    async with writing(store) as writer:
        results = await write_behind(
            store, writer, partial(plan_put, "a"), partial(plan_put, "b"), partial(plan_put, "a")
        )
        assert results == ["a", "b", "a"]
        assert store.commits[1:] == [[key("a"), key("b")], [key("a")]]


async def test_a_plan_that_fails_does_not_affect_the_others() -> None:
    def refuse(*, reading: ReadSet) -> tuple[str, Transaction]:
        raise Conflict("it is taken")

    store = RecordingStore()
    async with writing(store) as writer:
        good, bad, other = await write_behind(
            store, writer, partial(plan_put, "a"), partial(refuse), partial(plan_put, "b")
        )
        assert (good, other) == ("a", "b")
        assert isinstance(bad, Conflict)


async def test_a_failed_merged_commit_is_split() -> None:
    """One rejected write must not fail the others."""
    store = RecordingStore()
    async with writing(store) as writer:
        good, bad, other = await write_behind(
            store, writer, partial(plan_put, "a"), partial(plan_put, "forbidden"), partial(plan_put, "b")
        )
        assert (good, other) == ("a", "b")
        assert isinstance(bad, Unavailable), "refused for now, such as by a quota: it is tried again"
        assert store.commits[1:] == [[key("a"), key("forbidden"), key("b")], [key("a")], [key("forbidden")], [key("b")]]


async def test_a_write_that_stays_stale_is_unavailable_and_the_others_are_committed() -> None:
    store = RecordingStore()
    async with writing(store) as writer:
        never = RevisionEquals(key("absent"), 7)
        good, bad = await write_behind(store, writer, partial(plan_put, "a"), partial(plan_put, "c", when=never))
        assert good == "a"
        assert isinstance(bad, Unavailable)


async def test_after_an_unknown_outcome_nothing_more_is_committed() -> None:
    """Pending and later writes fail until the next session."""
    store = RecordingStore()
    async with writing(store) as writer:
        store.error = Unavailable("the store did not answer")
        waiting = [asyncio.ensure_future(writer.write(partial(_named, partial(plan_put, name)))) for name in "ab"]
        for result in await soon(asyncio.gather(*waiting, return_exceptions=True)):
            assert isinstance(result, Unavailable)
        assert not writer.connected
        with pytest.raises(Unavailable):
            await writer.write(partial(_named, partial(plan_put, "c")))
        assert len(store.commits) == 1


async def test_a_write_whose_caller_is_cancelled_is_committed_all_the_same() -> None:
    store = RecordingStore()
    async with writing(store) as writer:
        store.released.clear()
        cancelled = asyncio.ensure_future(writer.write(partial(_named, partial(plan_put, "a"))))
        await until(lambda: bool(store.commits))
        cancelled.cancel()
        store.released.set()
        assert await soon(writer.write(partial(_named, partial(plan_put, "b")))) == "b"
        assert await store.read(key("a")) is not None
