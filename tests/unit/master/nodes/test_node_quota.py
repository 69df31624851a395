"""Quotas of keys and bytes per node, and what bounds the history that a node can make (finding M3)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.support.fake_cluster import FakeCluster, endpoint, network

from weft.adapters.stores.memory import MemoryStore
from weft.adapters.stores.sqlite import open_store
from weft.adapters.stores.sqlite_file import StoreFile
from weft.domain.cluster import Cluster
from weft.domain.errors import Compacted, Denied
from weft.domain.ids import NodeName, StoreKey
from weft.domain.lifecycle.changes import endpoints
from weft.domain.store_types import Change, Delete, Event, Put
from weft.lab.waiting import until
from weft.master.nodes import node_quota
from weft.master.nodes.node_authorizer import NodeAuthorizer, lease_key
from weft.master.nodes.node_quota import NodeQuotas
from weft.runtime.store.feed import Feed
from weft.runtime.store.mirror import follow

ME, OTHER = NodeName("node-1"), NodeName("node-2")


def status(number: int, node: str = ME) -> StoreKey:
    return StoreKey(f"status/nodes/{node}/{number}")


async def test_M3_a_node_has_a_quota_of_keys_and_of_bytes() -> None:
    cluster = Cluster()
    quotas = NodeQuotas(cluster, max_keys=3, max_bytes=2_000)
    async with MemoryStore() as store, follow(store, cluster, quotas) as mirror:
        mine, theirs = (NodeAuthorizer(store, node, quotas=quotas) for node in (ME, OTHER))
        revision = await mine.commit([], [Put(status(number), b"x") for number in range(3)])
        await mirror.wait_for(revision, within=10)
        with pytest.raises(Denied, match=r"quota exceeded: node node-1 would have 4 keys.*limit is 3"):
            await mine.commit([], [Put(status(3), b"x")])
        with pytest.raises(Denied, match="bytes"):
            await mine.commit([], [Put(status(0), bytes(3_000))])
        # Another node is not concerned, and a key that is replaced or deleted makes room.
        await theirs.commit([], [Put(status(0, OTHER), b"x")])
        await mine.commit([], [Put(status(0), b"y")])
        revision = await mine.commit([], [Delete(status(1))])
        await mirror.wait_for(revision, within=10)
        await mine.commit([], [Put(status(3), b"x")])
    samples = {(s.name, s.labels["unit"]): s.value for metric in quotas.collect() for s in metric.samples}
    assert samples["weft_store_quota_exceeded_total", "keys"] == 1
    assert samples["weft_store_quota_exceeded_total", "bytes"] == 1


async def test_M3_a_node_has_a_quota_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a key, for up to a day: without a bound a node could make as many as it may send requests."""
    monkeypatch.setattr(node_quota, "MAX_LEASES", 2)
    cluster = Cluster()
    quotas = NodeQuotas(cluster, max_keys=0)
    async with MemoryStore() as store, follow(store, cluster, quotas) as mirror:
        mine, theirs = (NodeAuthorizer(store, node, quotas=quotas) for node in (ME, OTHER))
        leases = [await mine.grant(60), await mine.grant(60)]
        last = await store.read(lease_key(leases[-1]))
        assert last is not None
        await mirror.wait_for(last.revision, within=10)
        with pytest.raises(Denied, match="quota exceeded: node node-1 has 2 leases"):
            await mine.grant(60)
        await theirs.grant(60)
        await mine.revoke(leases[0])
        await until(lambda: not quotas._leases[ME] >= 2)
        await mine.grant(60)


def test_endpoints_and_claims_count_for_their_node() -> None:
    world = FakeCluster()
    world.put(network())
    wanted = msgspec.structs.replace(endpoint("e1"), host=ME)
    _, plan = endpoints.plan_create(world.reading(), wanted, busy=endpoints.Busy())
    world.carry_out(plan)
    quotas = NodeQuotas(world.cluster, max_keys=3)
    quotas.apply(Change(9, tuple(Event(key, value) for key, value in world.entries.items())))
    quotas.check(ME, [Put(status(1), b"")])
    with pytest.raises(Denied, match="would have 4 keys"):
        quotas.check(ME, [Put(status(1), b""), Put(status(2), b"")])


def test_M3_the_log_of_the_embedded_store_is_bounded_in_bytes(tmp_path: Path) -> None:
    file = StoreFile(tmp_path / "store.db", history=10_000, history_bytes=1 << 20)
    key = StoreKey("status/nodes/n1/x")
    for _ in range(60):
        file.transact([lambda transaction: transaction.commit([], [Put(key, bytes(100_000))])])
        assert file.log_bytes < 2 << 20
    revision = file.revision
    with pytest.raises(Compacted):
        file.changes_after(2)
    assert file.changes_after(revision - 1)[-1].revision == revision
    file.close()
    again = StoreFile(tmp_path / "store.db", history=10_000, history_bytes=1 << 20)
    assert again.revision == revision
    assert 0 < again.log_bytes < 2 << 20
    again.close()
    assert (tmp_path / "store.db").stat().st_size < 8 << 20


async def test_M3_a_watcher_reads_large_history_in_small_pages(tmp_path: Path) -> None:
    """A watcher from the start gets each change, and memory holds a few at a time."""
    async with open_store(tmp_path / "store.db") as store:
        start = (await store.list(StoreKey(""))).revision
        for _ in range(30):
            await store.commit([], [Put(StoreKey("x"), bytes(1_000_000))])
        seen = []
        async for change in store.watch(StoreKey(""), start):
            seen.append(change.revision)
            if len(seen) == 30:
                break
        assert seen == list(range(start + 1, start + 31))


def test_M3_the_feed_is_bounded_in_bytes() -> None:
    feed = Feed(revision=1, keep=1_000, keep_bytes=1_000_000)
    for revision in range(2, 102):
        feed.publish([Change(revision, (Event(StoreKey("x"), bytes(100_000)),))])
        assert feed.bytes <= 1_000_000
    assert feed.revision == 101
