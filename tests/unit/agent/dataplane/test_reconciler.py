"""The apply loop: applied revision, lag, sync acknowledgement, fault, and ports that somebody removes (R5)."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import cast

import msgspec
import pytest
from tests.support.fake_cluster import endpoint
from tests.support.fake_datapath import FakeNode, fake_node

from weft.agent.dataplane import reconciler as reconciler_module
from weft.agent.dataplane.desired_state import DesiredState, make_features
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.store.attachment_store import AttachmentStore
from weft.cni.request import AttachmentId
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.state import StateItem
from weft.domain.errors import DatapathFault, NotFound
from weft.domain.ids import NodeName
from weft.domain.store_types import Change, Entry, Event, Listing, Put
from weft.lab.waiting import until
from weft.ports.datapath import Datapath, DriftReport
from weft.runtime.tasks import background
from weft.runtime.worker_thread import WorkerThread

A = AttachmentId("a", "eth0")


class FailingDatapath:
    """A datapath that fails while `fails` is set."""

    def __init__(self) -> None:
        self.fails = False

    def converge(self, desired: Set[StateItem], *, keep_unknown: bool = False) -> DriftReport:
        if self.fails:
            raise DatapathFault("the kernel said no")
        return DriftReport(repaired=("one thing", "another"))

    def flush_datapath_cache(self) -> None: ...


class Bench:
    """A reconciler, fed as a store mirror does it."""

    def __init__(self, datapath: FailingDatapath, thread: WorkerThread) -> None:
        cluster, node, attachment_store = Cluster(), NodeName("one"), AttachmentStore()
        features = make_features(cluster, node=node, attachment_store=attachment_store)
        desired = DesiredState(cluster, node=node, attachment_store=attachment_store, features=features)
        self._subscribers = (cluster, desired)
        self.datapath = datapath
        self.reconciler = Reconciler(desired, executor=DatapathExecutor(cast("Datapath", datapath), thread))

    def replace(self, listing: Listing) -> None:
        for subscriber in self._subscribers:
            subscriber.replace(listing)

    def apply(self, change: Change) -> None:
        for subscriber in self._subscribers:
            subscriber.apply(change)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with WorkerThread("kernel") as thread:
        yield Bench(FailingDatapath(), thread)


async def test_a_round_applies_the_revision_known_at_its_start(bench: Bench) -> None:
    reconciler = bench.reconciler
    bench.replace(Listing((), 7))
    assert (reconciler.applied_revision, reconciler.lag) == (0, 7)
    await reconciler.converge()
    assert (reconciler.applied_revision, reconciler.lag, reconciler.repaired) == (7, 0, 2)
    bench.apply(Change(9, ()))
    bench.apply(Change(8, ()))
    assert (reconciler.applied_revision, reconciler.lag) == (7, 2)
    await reconciler.refresh()
    assert (reconciler.applied_revision, reconciler.lag) == (9, 0)


async def test_a_fault_is_reported_until_a_round_succeeds(bench: Bench) -> None:
    reconciler = bench.reconciler
    bench.replace(Listing((), 7))
    reconciler.fault = "the kernel said no"
    async with background(reconciler.run(), name="reconcile"):
        await until(lambda: reconciler.fault == "")
    assert reconciler.lag == 0
    bench.datapath.fails = True
    bench.apply(Change(8, ()))
    with pytest.raises(DatapathFault):
        await reconciler.converge()
    assert (reconciler.applied_revision, reconciler.lag) == (7, 1)


async def test_a_sync_request_is_acknowledged_by_a_round_that_began_when_it_was_known(bench: Bench) -> None:
    """Our own commits are in the cluster before older revisions: a revision alone does not say what was known."""
    reconciler = bench.reconciler
    bench.replace(Listing((), 7))
    bench.apply(Change(12, (Event(kinds.applied_key("one"), codec.encode(model.SyncStatus())),)))
    await reconciler.converge()
    assert (reconciler.applied_revision, reconciler.acked_revision, reconciler.sync_ack_due.is_set()) == (12, 0, False)
    bench.apply(Change(10, (Event(kinds.SYNC_REQUEST_KEY, b"{}"),)))
    assert reconciler.acked_revision == 0
    await reconciler.refresh()
    assert (reconciler.acked_revision, reconciler.sync_ack_due.is_set()) == (10, True)


async def test_a_round_that_fails_acknowledges_nothing(bench: Bench) -> None:
    reconciler = bench.reconciler
    bench.replace(Listing((Entry(kinds.SYNC_REQUEST_KEY, b"{}", 5),), 7))
    bench.datapath.fails = True
    with pytest.raises(DatapathFault):
        await reconciler.converge()
    assert reconciler.acked_revision == 0
    bench.datapath.fails = False
    await reconciler.converge()
    assert reconciler.acked_revision == 5


async def test_a_full_round_takes_no_change_for_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Endpoints come and go on this and other nodes; only what somebody else has changed is a drift repair."""
    monkeypatch.setattr(reconciler_module, "FULL_SYNC_INTERVAL_S", 0.0)
    two = model.Node(name=NodeName("two"), vtep_ip="192.0.2.2")
    far = msgspec.structs.replace(endpoint("far", network="default-net", address="10.1.9.1"), host="two")
    async with fake_node() as node, background(node.reconciler.run(), name="reconcile"):
        await node.call("ADD", "a")
        await node.reconciler.converge()
        before = node.reconciler.repaired
        for key, value in ((kinds.NODE.store_key("two"), two), (kinds.ENDPOINT.store_key(*far.key), far)):
            written = await node.store.commit([], [Put(key, codec.encode(value))])
            await until(lambda: node.reconciler.applied_revision >= written)  # noqa: B023  awaited in the same turn
        assert node.reconciler.repaired == before


async def lose(node: FakeNode, *containers: str) -> None:
    """Somebody removes their interfaces, and the agent reads everything back."""
    for container in containers:
        del node.datapath.plugged[AttachmentId(container, "eth0")]
    node.reconciler.missing.detected.clear()
    await node.reconciler.converge()


async def test_a_lost_interface_is_restored_as_often_as_it_is_lost() -> None:
    async with fake_node() as node:
        await node.call("ADD", "a")
        config = node.datapath.plugged[A]
        for _ in range(2):
            await lose(node, "a")
            assert node.reconciler.missing.detected.is_set()
            assert await node.attachments.replug_missing()
            assert node.datapath.plugged == {A: config}


async def test_a_failed_restore_is_retried_and_delays_no_other() -> None:
    async with fake_node() as node:
        for name in "ab":
            await node.call("ADD", name)
        await lose(node, "a", "b")
        node.datapath.faults["a"] = DatapathFault("the switch is down")
        assert not await node.attachments.replug_missing()
        assert {each.container for each in node.datapath.plugged} == {"b"}
        assert await node.attachments.replug_missing()
        assert {each.container for each in node.datapath.plugged} == {"a", "b"}


async def test_an_endpoint_that_cannot_be_restored_is_left_to_the_runtime() -> None:
    """Its namespace is gone: it is not retried, and DEL finds it."""
    async with fake_node() as node:
        await node.call("ADD", "a")
        await lose(node, "a")
        node.datapath.faults["a"] = NotFound("no such namespace")
        assert await node.attachments.replug_missing()
        node.reconciler.missing.detected.clear()
        await node.reconciler.converge()
        assert not node.reconciler.missing.detected.is_set()
        await node.call("DEL", "a")
        assert list(node.attachment_store) == []


async def test_a_detached_endpoint_is_not_missing_any_more() -> None:
    async with fake_node() as node:
        for name in "ab":
            await node.call("ADD", name)
        await lose(node, "a", "b")
        node.datapath.faults["a"] = DatapathFault("the switch is down")
        assert not await node.attachments.replug_missing()
        await node.call("DEL", "a")
        assert not node.reconciler.missing
        assert await node.attachments.replug_missing()
        assert {each.container for each in node.datapath.plugged} == {"b"}


async def test_an_endpoint_being_attached_is_not_missing() -> None:
    """With a dirty datapath an ADD reads everything back while its own port is recorded and not there yet."""
    async with fake_node() as node:
        await node.call("ADD", "there")
        node.reconciler.missing.detected.clear()
        node.reconciler.mark_dirty()
        await node.call("ADD", "a")
        assert (list(node.reconciler.missing), node.reconciler.missing.detected.is_set()) == ([], False)
        assert {each.container for each in node.datapath.plugged} == {"there", "a"}
