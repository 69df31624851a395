"""Readiness: each reason by itself, and staleness, which only a query of the store shows."""

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
from weft.agent.store.node_lease import NodeLease
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
        self.lease = SimpleNamespace(may_allocate=True, connected=True, refusal="")
        self.reconciler = SimpleNamespace(fault="", applied_revision=0)
        self.mirror = SimpleNamespace(revision=0)
        self.readiness = Readiness(
            store,
            mirror=cast("Mirror", self.mirror),
            attachments=cast("Attachments", self.attachments),
            lease=cast("NodeLease", self.lease),
            reconciler=cast("Reconciler", self.reconciler),
            limit=limit,
        )

    async def write(self) -> Revision:
        return await self.store.commit([], [Put(StoreKey("x"), b"")])

    async def check(self) -> list[str]:
        await self.readiness.check_staleness()
        return self.readiness.faults()


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    async with MemoryStore() as opened:
        yield opened


async def test_each_reason_is_reported(store: MemoryStore) -> None:
    node = Node(store, limit=LONG)
    assert node.readiness.faults() == []
    node.lease.connected = False
    assert node.readiness.faults() == ["the store is unreachable"]
    node.lease.refusal = "node n1 may not"
    assert node.readiness.faults() == ["the store refuses this node: node n1 may not"]
    node.lease.refusal = ""
    node.lease.may_allocate = False
    assert len(node.readiness.faults()) == 2
    node.attachments.ready.clear()
    node.reconciler.fault = "no"
    assert node.readiness.faults() == [
        "the node is not restored yet",
        "the store is unreachable",
        "datapath out of sync: no",
    ]


async def test_a_watch_that_delivers_nothing_is_a_fault_until_it_does(store: MemoryStore) -> None:
    node = Node(store, limit=NO_TIME)
    written = await node.write()
    assert await node.check() == []
    (fault,) = await node.check()
    assert "watch has delivered nothing" in fault
    node.reconciler.applied_revision = written + 5  # our own commits are applied before the watch delivers them
    assert await node.check() == [fault]
    node.mirror.revision = written
    assert await node.check() == []


async def test_changes_received_but_not_applied_are_a_fault(store: MemoryStore) -> None:
    node = Node(store, limit=NO_TIME)
    written = await node.write()
    await node.check()
    node.mirror.revision = written
    (fault,) = await node.check()
    assert "have not been applied" in fault
    node.reconciler.applied_revision = written
    assert await node.check() == []


async def test_a_delay_within_the_limit_is_no_fault(store: MemoryStore) -> None:
    node = Node(store, limit=LONG)
    await node.write()
    assert [await node.check() for _ in range(3)] == [[], [], []]


async def test_revisions_of_foreign_keys_are_no_fault(store: MemoryStore) -> None:
    """etcd counts the writes of its other users too; here a revision that puts nothing stands for them."""
    node = Node(store, limit=NO_TIME)
    lease = await store.grant(60)
    node.mirror.revision = await store.commit([], [Put(StoreKey("x"), b"", lease)])
    node.reconciler.applied_revision = node.mirror.revision
    await store.revoke(lease)
    assert await store.commit([], []) > node.mirror.revision
    assert [await node.check() for _ in range(3)] == [[], [], []]


async def test_run_checks_for_staleness(store: MemoryStore) -> None:
    node = Node(store, limit=0.01)
    await node.write()
    async with background(node.readiness.run(), name="readiness"):
        await until(lambda: node.readiness.faults() != [])
        node.mirror.revision = node.reconciler.applied_revision = await store.commit([], [])
        await until(lambda: node.readiness.faults() == [])
