"""Waiting for receipts: until the last node has answered, or with the names of those who have not."""

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
from weft.master.api.sync_wait import Receipts, WaitOptions, read_patience
from weft.master.metrics import Metrics
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

A, B = NodeName("a"), NodeName("b")
LONG = WaitOptions(60)
SHORT = WaitOptions(0.1)


class AwayStore(MemoryStore):
    """Refuses wishes while it is `away`."""

    away = False

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if self.away:
            raise Unavailable("away")
        return await super().commit(compares, writes)


class Bench:
    """A master that waits, and nodes that answer when they are told to."""

    def __init__(self, store: AwayStore) -> None:
        self.store = store
        self.cluster = Cluster()
        self.mirror = Mirror(store, self.cluster)
        self.receipts = Receipts(store, self.cluster, self.mirror)

    async def join(self, *names: NodeName) -> None:
        for name in names:
            node = Put(kinds.NODE.store_key(name), codec.encode(model.Node(name=name)))
            await self.store.commit([], [node, Put(kinds.alive_node(name), b"{}")])

    async def answer(self, name: NodeName, *faults: str, revision: Revision | None = None) -> None:
        told = model.Receipt(revision=self.cluster.receipt_wish if revision is None else revision, faults=faults)
        await self.store.commit([], [Put(kinds.receipt_of(name), codec.encode(told))])

    async def delete(self, *keys: str) -> None:
        await self.store.commit([], [Delete(StoreKey(key)) for key in keys])

    async def wished(self) -> None:
        """Return when the wish is known."""
        await until(lambda: self.cluster.receipt_wish > 0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AwayStore() as store:
        made = Bench(store)
        async with background(made.mirror.run(), name="mirror"):
            await made.mirror.wait_for(0, within=5)
            yield made


async def test_a_cluster_without_nodes_is_settled(bench: Bench) -> None:
    revision = await soon(bench.receipts.settle(LONG))
    assert revision == bench.cluster.receipt_wish


async def test_it_returns_when_the_last_node_has_answered(bench: Bench) -> None:
    await bench.join(A, B)
    waiting = asyncio.ensure_future(bench.receipts.settle(LONG))
    await bench.wished()
    await bench.answer(B)
    await until(lambda: B in bench.cluster.receipts)
    assert not waiting.done()
    await bench.answer(A, revision=bench.cluster.receipt_wish - 1)
    await until(lambda: A in bench.cluster.receipts)
    assert not waiting.done()
    await bench.answer(A)
    assert await soon(waiting) == bench.cluster.receipt_wish


async def test_at_the_deadline_the_laggards_are_named_with_what_they_said(bench: Bench) -> None:
    await bench.join(A, B)
    await bench.answer(B, "the datapath does not follow: no", revision=1)
    with pytest.raises(Behind) as late:
        await soon(bench.receipts.settle(SHORT))
    assert "a (alive), b (not ready; the datapath does not follow: no)" in late.value.message
    assert "stands" in late.value.message
    wish = bench.cluster.receipt_wish
    assert late.value.details == {
        "revision": wish,
        "laggards": [
            {"node": "a", "state": "alive", "realisedRevision": 0, "lag": wish, "reasons": []},
            {
                "node": "b",
                "state": "not ready",
                "realisedRevision": 1,
                "lag": wish - 1,
                "reasons": ["the datapath does not follow: no"],
            },
        ],
    }


async def test_silent_nodes_can_be_left_out_also_when_they_fall_silent_meanwhile(bench: Bench) -> None:
    await bench.join(A, B)
    await bench.delete(kinds.alive_node(A))
    with pytest.raises(Behind, match=r"a \(silent\)"):
        await soon(bench.receipts.settle(SHORT))
    waiting = asyncio.ensure_future(bench.receipts.settle(WaitOptions(60, skip_silent=True)))
    await bench.wished()
    await bench.delete(kinds.alive_node(B))
    await soon(waiting)


async def test_nodes_that_come_and_go_meanwhile_count_as_they_are(bench: Bench) -> None:
    await bench.join(A)
    waiting = asyncio.ensure_future(bench.receipts.settle(LONG))
    await bench.wished()
    await bench.join(B)
    await bench.answer(A)
    await until(lambda: A in bench.cluster.receipts)
    assert not waiting.done()
    await bench.delete(kinds.NODE.store_key(B))
    await soon(waiting)


async def test_many_wait_at_once(bench: Bench) -> None:
    await bench.join(A)
    waiting = [asyncio.ensure_future(bench.receipts.settle(LONG)) for _ in range(50)]
    await until(lambda: bench.cluster.receipt_wish >= 50)
    await bench.answer(A)
    await soon(asyncio.gather(*waiting))


async def test_a_store_that_takes_no_wish_says_that_the_write_stands(bench: Bench) -> None:
    bench.store.away = True
    with pytest.raises(Behind, match="stands"):
        await bench.receipts.settle(LONG)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "61", "1e9"])
def test_a_wait_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Malformed) as refused:
        read_patience({"wait": text})
    assert refused.value.field == "wait"


def test_patience_is_read_from_the_query() -> None:
    assert read_patience({}) is None
    assert read_patience({"wait": "0.5"}) == WaitOptions(0.5)
    assert read_patience({"wait": "60", "skip-silent": "1"}) == WaitOptions(60, skip_silent=True)
    assert read_patience({"skip-silent": "true"}) is None
    with pytest.raises(Malformed) as refused:
        read_patience({"wait": "1", "skip-silent": "maybe"})
    assert refused.value.field == "skip-silent"


async def test_nodes_are_counted_by_state(bench: Bench) -> None:
    await bench.join(A, B, NodeName("c"))
    await bench.answer(A, "the datapath does not follow: no")
    await bench.delete(kinds.alive_node(B))
    await until(lambda: A in bench.cluster.receipts and bench.cluster.is_silent(B))
    told = Metrics().expose(bench.cluster).decode()
    for state in ("alive", "not ready", "silent"):
        assert f'weft_nodes{{state="{state}"}} 1.0' in told
