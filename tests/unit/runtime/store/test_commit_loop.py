"""The commit loop: conflicts are planned again on the newer state, within limits, and other errors pass through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from weft.adapters.stores.memory import open_store
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Exhausted, Stale, Unavailable
from weft.domain.ids import StoreKey, TenantName
from weft.domain.store_types import Delete, DeleteAll, Event, Put
from weft.domain.transaction import ReadSet, Transaction, put
from weft.lab.waiting import soon
from weft.ports.store import Store
from weft.runtime.store.commit_loop import TRIES, CommitLoop, TooManyConflicts, own_events, retry_stale
from weft.runtime.store.mirror import Mirror, follow

TENANT = TenantName("t1")


class Bench:
    """A loop over a store in memory, which counts its commits."""

    def __init__(self, store: Store, cluster: Cluster, mirror: Mirror) -> None:
        self.store = store
        self.cluster = cluster
        self.mirror = mirror
        self.commits = 0
        self.held = 0
        self.loop = CommitLoop(cluster=cluster, mirror=mirror, commit=self._commit, hold=self._hold)

    async def _commit(self, transaction: Transaction) -> None:
        self.commits += 1
        assert self.held
        revision = await self.store.commit(transaction.compares, transaction.writes)
        self.mirror.note_own(revision, own_events(transaction.writes))

    @contextmanager
    def _hold(self, _: Transaction) -> Iterator[None]:
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    async def increment(self) -> None:
        """Lengthen the tenant's default network by one letter; every plan reads what it writes."""
        await self.loop.run(self._plan_increment)

    def _plan_increment(self, reading: ReadSet) -> tuple[None, Transaction]:
        tenant = reading.get(kinds.TENANT, TENANT)
        network = tenant.default_network if tenant else ""
        return None, reading.plan([put(kinds.TENANT, model.Tenant(name=TENANT, default_network=f"{network}x"))])

    @property
    def network(self) -> str:
        stored = self.cluster.get(kinds.TENANT, TENANT)
        return stored.value.default_network if stored else ""


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    cluster = Cluster()
    async with open_store() as store, follow(store, cluster) as mirror:
        yield Bench(store, cluster, mirror)


async def test_concurrent_plans_that_conflict_all_succeed(bench: Bench) -> None:
    await soon(asyncio.gather(*(bench.increment() for _ in range(TRIES * 2))))
    assert bench.network == "x" * TRIES * 2
    assert bench.held == 0


async def test_a_conflict_with_another_process_is_planned_again_on_its_write(bench: Bench) -> None:
    async def interfere() -> None:
        other = codec.encode(model.Tenant(name=TENANT, default_network="other"))
        await bench.store.commit([], [Put(kinds.TENANT.store_key(TENANT), other)])

    interfering = asyncio.ensure_future(interfere())
    await asyncio.sleep(0)
    await soon(bench.increment())
    await interfering
    assert bench.network == "otherx"


async def test_a_plan_without_writes_commits_nothing(bench: Bench) -> None:
    assert await bench.loop.run(lambda _: (7, Transaction())) == 7
    assert bench.commits == 0


async def test_conflicts_without_end_are_reported(bench: Bench) -> None:
    async def always_stale(_: Transaction) -> None:
        bench.commits += 1
        raise Stale("conflict")

    loop = CommitLoop(cluster=bench.cluster, mirror=bench.mirror, commit=always_stale)
    writes = Transaction((), (Put(StoreKey("a"), b""),))
    with pytest.raises(TooManyConflicts, match="too many conflicting writes"):
        await loop.run(lambda _: (None, writes))
    assert bench.commits == TRIES + 1


@pytest.mark.parametrize("error", [Exhausted("no address"), Unavailable("no answer")])
async def test_other_errors_pass_through_at_once(bench: Bench, error: Exception) -> None:
    def plan(_: ReadSet) -> tuple[None, Transaction]:
        raise error

    with pytest.raises(type(error)) as caught:
        await bench.loop.run(plan)
    assert caught.value is error
    assert not isinstance(caught.value, TooManyConflicts)


async def test_catching_up_can_end_the_loop() -> None:
    async def attempt() -> None:
        raise Stale("conflict")

    async def catch_up(conflict: Stale) -> None:
        raise conflict

    with pytest.raises(Stale, match="conflict"):
        await retry_stale(attempt, catch_up=catch_up)
    with pytest.raises(Stale, match="too many conflicting writes"):
        await retry_stale(attempt, tries=2, exhausted=Stale)


def test_own_events_leave_out_deletions_by_prefix() -> None:
    a, b = StoreKey("a"), StoreKey("b")
    assert list(own_events([Put(a, b"1"), Delete(b), DeleteAll(StoreKey("c/"))])) == [Event(a, b"1"), Event(b, None)]
