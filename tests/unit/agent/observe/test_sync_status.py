"""A node's receipts: given when asked and when its readiness changes, many wishes in one, and none for itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from weft.adapters.stores.memory import MemoryStore
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.observe.sync_status import Receipts
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
    """Counts the receipts it was sent, and takes none while it is `away`."""

    receipts = 0
    away = False

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if any(isinstance(write, Put) and write.key == kinds.receipt_of(NODE) for write in writes):
            if self.away:
                raise Unavailable("away")
            self.receipts += 1
        return await super().commit(compares, writes)


class Prompt:
    """Stands in for the reconciler: whatever comes is carried out at once, unless it is told to hold."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.receipt_due = asyncio.Event()
        self.settled: Revision = 0
        self.holds = False

    def replace(self, listing: Listing) -> None:
        self._cluster.replace(listing)
        self.carry_out()

    def apply(self, change: Change) -> None:
        self._cluster.apply(change)
        self.carry_out()

    def carry_out(self) -> None:
        if not self.holds and self.settled != self._cluster.receipt_wish:
            self.settled = self._cluster.receipt_wish
            self.receipt_due.set()


class Bench:
    """A node that gives receipts on a store in memory."""

    def __init__(self, store: CountingStore) -> None:
        self.store = store
        self.cluster = Cluster()
        self.node = Prompt(self.cluster)
        self.mirror = Mirror(store, self.node)
        self.faults: list[str] | None = []

    async def wish(self) -> Revision:
        return await self.store.commit([], [Put(kinds.RECEIPT_WISH_KEY, b"{}")])

    @property
    def told(self) -> model.Receipt | None:
        return self.cluster.receipts.get(NODE)

    async def until_told(self, revision: Revision, *faults: str) -> None:
        await until(lambda: self.told == model.Receipt(revision=revision, faults=faults))


@asynccontextmanager
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        made = Bench(await stack.enter_async_context(CountingStore()))
        receipts = Receipts(
            made.store,
            node=NODE,
            cluster=made.cluster,
            mirror=made.mirror,
            reconciler=cast("Reconciler", made.node),
            faults=lambda: made.faults,
        )
        await stack.enter_async_context(background(made.mirror.run(), name="mirror"))
        await made.mirror.wait_for(0, within=5)
        await stack.enter_async_context(background(receipts.run(), name="receipts"))
        yield made


async def test_a_wish_is_answered_when_it_is_carried_out() -> None:
    async with bench() as node:
        await node.until_told(await node.wish())
        node.node.holds = True
        before = node.told
        asked = await node.wish()
        await until(lambda: node.cluster.receipt_wish == asked)
        assert node.told == before
        node.node.holds = False
        node.node.carry_out()
        await node.until_told(asked)


async def test_many_wishes_get_few_receipts_and_no_receipt_leads_to_another() -> None:
    async with bench() as node:
        for _ in range(200):
            asked = await node.wish()
        await node.until_told(asked)
        assert node.store.receipts <= 20
        told, revision = node.store.receipts, await node.store.commit([], [])
        for _ in range(20):
            node.node.receipt_due.set()
            await asyncio.sleep(0)
        assert (node.store.receipts, await node.store.commit([], [])) == (told, revision)


async def test_readiness_is_told_when_it_changes() -> None:
    async with bench() as node:
        await node.until_told(0)
        node.faults = ["the datapath does not follow: no"]
        await node.until_told(0, "the datapath does not follow: no")
        node.faults = None  # out of touch: nobody could be told
        asked = await node.wish()
        await until(lambda: node.node.settled == asked)
        node.faults = []
        await node.until_told(asked)


async def test_what_the_store_did_not_take_or_has_lost_is_told_again() -> None:
    async with bench() as node:
        node.store.away = True
        asked = await node.wish()
        await until(lambda: node.node.settled == asked)
        node.store.away = False
        await node.until_told(asked)
        await node.store.commit([], [Put(kinds.receipt_of(NODE), b'{"v":1,"o":{}}')])
        await until(lambda: node.told == model.Receipt())
        await node.until_told(asked)
