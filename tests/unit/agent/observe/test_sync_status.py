"""A node's sync status: written on request and when its readiness changes; many requests share one write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from weft.adapters.stores.memory import MemoryStore
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.observe.sync_status import SyncStatusReporter
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Unavailable
from weft.domain.ids import NodeName
from weft.domain.store_types import Change, Compare, Listing, Put, Revision, Write
from weft.lab.waiting import until
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

NODE = NodeName("one")


class CountingStore(MemoryStore):
    """Counts the status writes, and rejects them while it is `unreachable`."""

    status_writes = 0
    unreachable = False

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if any(isinstance(write, Put) and write.key == kinds.applied_key(NODE) for write in writes):
            if self.unreachable:
                raise Unavailable("unreachable")
            self.status_writes += 1
        return await super().commit(compares, writes)


class PromptReconciler:
    """Stands in for the reconciler: it applies everything at once, unless it is `paused`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.sync_ack_due = asyncio.Event()
        self.acked_revision: Revision = 0
        self.paused = False

    def replace(self, listing: Listing) -> None:
        self._cluster.replace(listing)
        self.apply_all()

    def apply(self, change: Change) -> None:
        self._cluster.apply(change)
        self.apply_all()

    def apply_all(self) -> None:
        if not self.paused and self.acked_revision != self._cluster.sync_request:
            self.acked_revision = self._cluster.sync_request
            self.sync_ack_due.set()


class Bench:
    """A node that reports its status to a store in memory."""

    def __init__(self, store: CountingStore) -> None:
        self.store = store
        self.cluster = Cluster()
        self.reconciler = PromptReconciler(self.cluster)
        self.mirror = Mirror(store, self.reconciler)
        self.faults: list[str] | None = []

    async def request_sync(self) -> Revision:
        return await self.store.commit([], [Put(kinds.SYNC_REQUEST_KEY, b"{}")])

    @property
    def reported(self) -> model.SyncStatus | None:
        return self.cluster.sync_statuses.get(NODE)

    async def wait_reported(self, revision: Revision, *faults: str) -> None:
        await until(lambda: self.reported == model.SyncStatus(revision=revision, faults=faults))


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        made = Bench(await stack.enter_async_context(CountingStore()))
        reporter = SyncStatusReporter(
            made.store,
            node=NODE,
            cluster=made.cluster,
            mirror=made.mirror,
            reconciler=cast("Reconciler", made.reconciler),
            faults=lambda: made.faults,
        )
        await stack.enter_async_context(background(made.mirror.run(), name="mirror"))
        await made.mirror.wait_for(0, within=5)
        await stack.enter_async_context(background(reporter.run(), name="sync status"))
        yield made


async def test_a_sync_request_is_acknowledged_when_it_is_applied() -> None:
    async with bench() as node:
        await node.wait_reported(await node.request_sync())
        node.reconciler.paused = True
        before = node.reported
        requested = await node.request_sync()
        await until(lambda: node.cluster.sync_request == requested)
        assert node.reported == before
        node.reconciler.paused = False
        node.reconciler.apply_all()
        await node.wait_reported(requested)


async def test_many_requests_get_few_acknowledgements_and_none_triggers_another() -> None:
    async with bench() as node:
        for _ in range(200):
            requested = await node.request_sync()
        await node.wait_reported(requested)
        assert node.store.status_writes <= 20
        writes, revision = node.store.status_writes, await node.store.commit([], [])
        for _ in range(20):
            node.reconciler.sync_ack_due.set()
            await asyncio.sleep(0)
        assert (node.store.status_writes, await node.store.commit([], [])) == (writes, revision)


async def test_readiness_is_reported_when_it_changes() -> None:
    async with bench() as node:
        await node.wait_reported(0)
        node.faults = ["datapath out of sync: no"]
        await node.wait_reported(0, "datapath out of sync: no")
        node.faults = None  # disconnected: nothing can be written
        requested = await node.request_sync()
        await until(lambda: node.reconciler.acked_revision == requested)
        node.faults = []
        await node.wait_reported(requested)


async def test_a_status_that_failed_or_was_lost_is_written_again() -> None:
    async with bench() as node:
        node.store.unreachable = True
        requested = await node.request_sync()
        await until(lambda: node.reconciler.acked_revision == requested)
        node.store.unreachable = False
        await node.wait_reported(requested)
        await node.store.commit([], [Put(kinds.applied_key(NODE), b'{"v":1,"o":{}}')])
        await until(lambda: node.reported == model.SyncStatus())
        await node.wait_reported(requested)
