"""Waiting for realization: until the last node has acknowledged, or with the pending nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Behind, Malformed, Unavailable
from weft.domain.ids import NodeName, StoreKey
from weft.domain.store_types import Compare, Delete, Put, Revision, Write
from weft.lab.waiting import soon, until
from weft.master.api.sync_wait import SyncWait, WaitOptions, read_wait_options
from weft.master.metrics import Metrics
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

A, B = NodeName("a"), NodeName("b")
LONG = WaitOptions(60)
SHORT = WaitOptions(0.1)


class AwayStore(MemoryStore):
    """Rejects commits while it is `away`."""

    away = False

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if self.away:
            raise Unavailable("away")
        return await super().commit(compares, writes)


class Bench:
    """A master that waits, and nodes that acknowledge when the test says so."""

    def __init__(self, store: AwayStore) -> None:
        self.store = store
        self.cluster = Cluster()
        self.mirror = Mirror(store, self.cluster)
        self.sync_wait = SyncWait(store, self.cluster, self.mirror)

    async def join(self, *names: NodeName) -> None:
        for name in names:
            node = Put(kinds.NODE.store_key(name), codec.encode(model.Node(name=name)))
            await self.store.commit([], [node, Put(kinds.alive_node(name), b"{}")])

    async def acknowledge(self, name: NodeName, *faults: str, revision: Revision | None = None) -> None:
        status = model.SyncStatus(revision=self.cluster.sync_request if revision is None else revision, faults=faults)
        await self.store.commit([], [Put(kinds.applied_key(name), codec.encode(status))])

    async def delete(self, *keys: str) -> None:
        await self.store.commit([], [Delete(StoreKey(key)) for key in keys])

    async def requested(self) -> None:
        """Return when the mirror has the sync request."""
        await until(lambda: self.cluster.sync_request > 0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AwayStore() as store:
        made = Bench(store)
        async with background(made.mirror.run(), name="mirror"):
            await made.mirror.wait_for(0, within=5)
            yield made


async def test_a_cluster_without_nodes_is_in_sync(bench: Bench) -> None:
    revision = await soon(bench.sync_wait.wait_for_sync(LONG))
    assert revision == bench.cluster.sync_request


async def test_it_returns_when_the_last_node_has_acknowledged(bench: Bench) -> None:
    await bench.join(A, B)
    waiting = asyncio.ensure_future(bench.sync_wait.wait_for_sync(LONG))
    await bench.requested()
    await bench.acknowledge(B)
    await until(lambda: B in bench.cluster.sync_statuses)
    assert not waiting.done()
    await bench.acknowledge(A, revision=bench.cluster.sync_request - 1)
    await until(lambda: A in bench.cluster.sync_statuses)
    assert not waiting.done()
    await bench.acknowledge(A)
    assert await soon(waiting) == bench.cluster.sync_request


async def test_at_the_deadline_the_pending_nodes_are_listed_with_their_reasons(bench: Bench) -> None:
    await bench.join(A, B)
    await bench.acknowledge(B, "datapath out of sync: no", revision=1)
    with pytest.raises(Behind) as late:
        await soon(bench.sync_wait.wait_for_sync(SHORT))
    assert "a (Ready), b (NotReady; datapath out of sync: no)" in late.value.message
    assert "is committed" in late.value.message
    request = bench.cluster.sync_request
    assert late.value.details == {
        "revision": request,
        "pendingNodes": [
            {"node": "a", "state": "Ready", "appliedRevision": 0, "lag": request, "reasons": []},
            {
                "node": "b",
                "state": "NotReady",
                "appliedRevision": 1,
                "lag": request - 1,
                "reasons": ["datapath out of sync: no"],
            },
        ],
    }


async def test_unreachable_nodes_can_be_ignored_also_those_that_become_unreachable_meanwhile(bench: Bench) -> None:
    await bench.join(A, B)
    await bench.delete(kinds.alive_node(A))
    with pytest.raises(Behind, match=r"a \(Unreachable\)"):
        await soon(bench.sync_wait.wait_for_sync(SHORT))
    waiting = asyncio.ensure_future(bench.sync_wait.wait_for_sync(WaitOptions(60, ignore_unreachable=True)))
    await bench.requested()
    await bench.delete(kinds.alive_node(B))
    await soon(waiting)


async def test_nodes_that_join_and_leave_during_the_wait_are_respected(bench: Bench) -> None:
    await bench.join(A)
    waiting = asyncio.ensure_future(bench.sync_wait.wait_for_sync(LONG))
    await bench.requested()
    await bench.join(B)
    await bench.acknowledge(A)
    await until(lambda: A in bench.cluster.sync_statuses)
    assert not waiting.done()
    await bench.delete(kinds.NODE.store_key(B))
    await soon(waiting)


async def test_concurrent_waits(bench: Bench) -> None:
    await bench.join(A)
    waiting = [asyncio.ensure_future(bench.sync_wait.wait_for_sync(LONG)) for _ in range(50)]
    await until(lambda: bench.cluster.sync_request >= 50)
    await bench.acknowledge(A)
    await soon(asyncio.gather(*waiting))


async def test_a_store_that_rejects_the_sync_request_reports_that_the_write_is_committed(bench: Bench) -> None:
    bench.store.away = True
    with pytest.raises(Behind, match="is committed"):
        await bench.sync_wait.wait_for_sync(LONG)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "61", "1e9"])
def test_an_invalid_wait_is_rejected(text: str) -> None:
    with pytest.raises(Malformed) as refused:
        read_wait_options({"wait": text})
    assert refused.value.field == "wait"


def test_wait_options_are_read_from_the_query() -> None:
    assert read_wait_options({}) is None
    assert read_wait_options({"wait": "0.5"}) == WaitOptions(0.5)
    assert read_wait_options({"wait": "60", "ignore-unreachable": "1"}) == WaitOptions(60, ignore_unreachable=True)
    assert read_wait_options({"ignore-unreachable": "true"}) is None
    with pytest.raises(Malformed) as refused:
        read_wait_options({"wait": "1", "ignore-unreachable": "maybe"})
    assert refused.value.field == "ignore-unreachable"


async def test_the_metric_counts_nodes_by_state(bench: Bench) -> None:
    await bench.join(A, B, NodeName("c"))
    await bench.acknowledge(A, "datapath out of sync: no")
    await bench.delete(kinds.alive_node(B))
    await until(lambda: A in bench.cluster.sync_statuses and bench.cluster.is_unreachable(B))
    text = Metrics().expose(bench.cluster).decode()
    for state in ("ready", "not_ready", "unreachable"):
        assert f'weft_nodes{{state="{state}"}} 1.0' in text
