"""Readiness: each reason by itself, and staleness, which shows only by asking the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.agent.cni.attachments import Attachments
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.observe.readiness import Readiness
from weft.agent.store.node_ipam import NodeIpam
from weft.domain.ids import StoreKey
from weft.domain.store_types import Put, Revision
from weft.lab.waiting import until
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

# A limit that has always passed already.
NO_TIME = 1e-9
LONG = 3600.0


class Node:
    """What readiness looks at, all well at first; `seen` is how far the news has come."""

    def __init__(self, store: MemoryStore, *, limit: float) -> None:
        self.store = store
        self.attachments = SimpleNamespace(ready=asyncio.Event())
        self.attachments.ready.set()
        self.holdings = SimpleNamespace(may_allocate=True, connected=True)
        self.reconciler = SimpleNamespace(fault="", realised=0)
        self.mirror = SimpleNamespace(revision=0)
        self.readiness = Readiness(
            store,
            mirror=cast("Mirror", self.mirror),
            attachments=cast("Attachments", self.attachments),
            holdings=cast("NodeIpam", self.holdings),
            reconciler=cast("Reconciler", self.reconciler),
            limit=limit,
        )

    async def write(self) -> Revision:
        return await self.store.commit([], [Put(StoreKey("x"), b"")])

    async def look(self) -> list[str]:
        await self.readiness.look()
        return self.readiness.faults()


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as opened:
        yield opened


async def test_each_reason_is_told(store: MemoryStore) -> None:
    node = Node(store, limit=LONG)
    assert node.readiness.faults() == []
    node.holdings.connected = False
    assert node.readiness.faults() == ["the store is away"]
    node.holdings.may_allocate = False
    assert len(node.readiness.faults()) == 2
    node.attachments.ready.clear()
    node.reconciler.fault = "no"
    assert node.readiness.faults() == [
        "the node is not restored yet",
        "the store is away",
        "the datapath does not follow: no",
    ]


async def test_news_that_does_not_come_is_a_fault_until_it_comes(store: MemoryStore) -> None:
    node = Node(store, limit=NO_TIME)
    written = await node.write()
    assert await node.look() == []
    (fault,) = await node.look()
    assert "news has not come" in fault
    node.reconciler.realised = written + 5  # our own commits are carried out without the news
    assert await node.look() == [fault]
    node.mirror.revision = written
    assert await node.look() == []


async def test_what_is_known_but_not_carried_out_is_a_fault(store: MemoryStore) -> None:
    node = Node(store, limit=NO_TIME)
    written = await node.write()
    await node.look()
    node.mirror.revision = written
    (fault,) = await node.look()
    assert "not been carried out" in fault
    node.reconciler.realised = written
    assert await node.look() == []


async def test_what_is_late_but_within_the_limit_is_no_fault(store: MemoryStore) -> None:
    node = Node(store, limit=LONG)
    await node.write()
    assert [await node.look() for _ in range(3)] == [[], [], []]


async def test_revisions_that_are_none_of_ours_are_no_fault(store: MemoryStore) -> None:
    """etcd counts the writes of its other users too; here a revision that puts nothing stands for them."""
    node = Node(store, limit=NO_TIME)
    lease = await store.grant(60)
    node.mirror.revision = await store.commit([], [Put(StoreKey("x"), b"", lease)])
    node.reconciler.realised = node.mirror.revision
    await store.revoke(lease)
    assert await store.commit([], []) > node.mirror.revision
    assert [await node.look() for _ in range(3)] == [[], [], []]


async def test_it_looks_by_itself(store: MemoryStore) -> None:
    node = Node(store, limit=0.01)
    await node.write()
    async with background(node.readiness.run(), name="readiness"):
        await until(lambda: node.readiness.faults() != [])
        node.mirror.revision = node.reconciler.realised = await store.commit([], [])
        await until(lambda: node.readiness.faults() == [])
