"""How far the kernel has come, as the agent tells it: realised revision, lag and fault."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import cast

import msgspec
import pytest
from tests.support.fake_cluster import endpoint
from tests.support.fake_datapath import paper_node

from weft.agent.dataplane import reconciler as reconciler_module
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.state import StateItem
from weft.domain.errors import DatapathFault
from weft.domain.ids import NodeName
from weft.domain.store_types import Change, Entry, Event, Listing, Put
from weft.lab.waiting import until
from weft.ports.datapath import Datapath, DriftReport
from weft.runtime.tasks import background
from weft.runtime.worker_thread import WorkerThread


class Moody:
    """A datapath that refuses for as long as it is told to."""

    def __init__(self) -> None:
        self.refuses = False

    def converge(self, wanted: Set[StateItem]) -> DriftReport:
        if self.refuses:
            raise DatapathFault("the kernel said no")
        return DriftReport(repaired=("one thing", "another"))

    def settle(self) -> None: ...


@contextmanager
def reconciler(datapath: Moody) -> Iterator[Reconciler]:
    with WorkerThread("kernel") as thread:
        kernel = DatapathExecutor(cast("Datapath", datapath), thread)
        yield Reconciler(Cluster(), node=NodeName("one"), journal=AttachmentStore(), kernel=kernel)


async def test_what_was_known_at_the_start_of_a_round_is_realised_at_its_end() -> None:
    with reconciler(Moody()) as each:
        each.replace(Listing((), 7))
        assert (each.realised, each.lag) == (0, 7)
        await each.converge()
        assert (each.realised, each.lag, each.repaired) == (7, 0, 2)
        each.apply(Change(9, ()))
        each.apply(Change(8, ()))
        assert (each.realised, each.lag) == (7, 2)
        await each.refresh()
        assert (each.realised, each.lag) == (9, 0)


async def test_a_fault_is_told_until_a_round_succeeds() -> None:
    datapath = Moody()
    with reconciler(datapath) as each:
        each.replace(Listing((), 7))
        each.fault = "the kernel said no"
        async with background(each.run(), name="reconcile"):
            await until(lambda: each.fault == "")
        assert each.lag == 0
        datapath.refuses = True
        each.apply(Change(8, ()))
        with pytest.raises(DatapathFault):
            await each.converge()
        assert (each.realised, each.lag) == (7, 1)


async def test_a_wish_is_settled_by_a_round_that_began_when_it_was_known() -> None:
    """Our own commits are in the cluster before older news: a revision alone does not say what was known."""
    with reconciler(Moody()) as each:
        each.replace(Listing((), 7))
        each.apply(Change(12, (Event(kinds.receipt_of("one"), codec.encode(model.Receipt())),)))
        await each.converge()
        assert (each.realised, each.settled, each.receipt_due.is_set()) == (12, 0, False)
        each.apply(Change(10, (Event(kinds.RECEIPT_WISH_KEY, b"{}"),)))
        assert each.settled == 0
        await each.refresh()
        assert (each.settled, each.receipt_due.is_set()) == (10, True)


async def test_a_round_that_fails_settles_nothing() -> None:
    datapath = Moody()
    with reconciler(datapath) as each:
        each.replace(Listing((Entry(kinds.RECEIPT_WISH_KEY, b"{}", 5),), 7))
        datapath.refuses = True
        with pytest.raises(DatapathFault):
            await each.converge()
        assert each.settled == 0
        datapath.refuses = False
        await each.converge()
        assert each.settled == 5


async def test_a_full_round_takes_no_news_for_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods come and go here and elsewhere; the log says "mended" only where somebody else had a hand in it."""
    monkeypatch.setattr(reconciler_module, "FULL_ROUND_S", 0.0)
    two = model.Node(name=NodeName("two"), vtep_ip="192.0.2.2")
    far = msgspec.structs.replace(endpoint("far", network="default-net", address="10.1.9.1"), host="two")
    async with paper_node() as node, background(node.reconciler.run(), name="reconcile"):
        await node.call("ADD", "a")
        await node.reconciler.converge()
        before = node.reconciler.repaired
        for key, value in ((kinds.NODE.store_key("two"), two), (kinds.ENDPOINT.store_key(*far.key), far)):
            written = await node.store.commit([], [Put(key, codec.encode(value))])
            await until(lambda: node.reconciler.realised >= written)  # noqa: B023  awaited in the same turn
        assert node.reconciler.repaired == before
