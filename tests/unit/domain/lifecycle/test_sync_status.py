"""Who is behind, judged by receipts: nodes that were not asked, that answered, fell silent, or are gone."""

from __future__ import annotations

from tests.support.fake_cluster import FakeCluster

from weft.domain import codec, kinds, model
from weft.domain.ids import NodeName, StoreKey
from weft.domain.lifecycle.sync_status import is_behind, laggards, node_status
from weft.domain.oper import oper_of
from weft.domain.store_types import Delete, Put, Write
from weft.domain.transaction import Transaction

A, B = NodeName("a"), NodeName("b")


def write(world: FakeCluster, *writes: Write) -> int:
    world.carry_out(Transaction((), writes))
    return world.revision


def world_of(*names: NodeName) -> FakeCluster:
    world = FakeCluster()
    for name in names:
        node = Put(kinds.NODE.store_key(name), codec.encode(model.Node(name=name)))
        write(world, node, Put(kinds.alive_node(name), b"{}"))
    return world


def wish(world: FakeCluster) -> int:
    return write(world, Put(kinds.RECEIPT_WISH_KEY, b"{}"))


def tell(world: FakeCluster, name: NodeName, revision: int, *faults: str) -> None:
    write(world, Put(kinds.receipt_of(name), codec.encode(model.Receipt(revision=revision, faults=faults))))


def behind(world: FakeCluster, revision: int, *, skip_silent: bool = False) -> list[NodeName]:
    return list(laggards(world.cluster, revision, skip_silent=skip_silent))


def test_a_node_is_behind_until_its_receipt_reaches_the_wish() -> None:
    world = world_of(A, B)
    asked = wish(world)
    assert behind(world, asked) == [A, B]
    tell(world, A, asked - 1)
    assert behind(world, asked) == [A, B]
    tell(world, A, asked)
    assert behind(world, asked) == [B]
    tell(world, B, asked + 7)
    assert behind(world, asked) == []


def test_a_silent_node_is_behind_unless_it_is_left_out() -> None:
    world = world_of(A, B)
    asked = wish(world)
    write(world, Delete(kinds.alive_node(B)))
    tell(world, A, asked)
    assert behind(world, asked) == [B]
    assert behind(world, asked, skip_silent=True) == []


def test_a_node_that_is_gone_is_not_waited_for() -> None:
    world = world_of(A, B)
    asked = wish(world)
    write(world, Delete(kinds.NODE.store_key(A)))
    assert not is_behind(world.cluster, A, asked, skip_silent=False)
    assert behind(world, asked) == [B]


def test_the_status_of_a_node_counts_from_the_last_wish() -> None:
    world = world_of(A)
    assert node_status(world.cluster, A) == {"state": "alive", "realisedRevision": 0, "lag": 0, "reasons": []}
    asked = wish(world)
    tell(world, A, asked)
    assert node_status(world.cluster, A)["lag"] == 0, "what was written since nobody asked about"
    again = wish(world)
    status = node_status(world.cluster, A)
    assert (status["realisedRevision"], status["lag"]) == (asked, again - asked)


def test_faults_are_the_state_until_the_node_falls_silent() -> None:
    world = world_of(A)
    tell(world, A, 1, "the datapath does not follow: no")
    status = node_status(world.cluster, A)
    assert (status["state"], status["reasons"]) == ("not ready", ["the datapath does not follow: no"])
    stored = world.cluster.get(kinds.NODE, A)
    assert stored is not None
    assert oper_of(world.cluster, kinds.NODE, stored.value)["state"] == "not ready"
    write(world, Delete(kinds.alive_node(A)))
    assert node_status(world.cluster, A)["state"] == "silent"


def test_receipts_and_wishes_come_and_go_and_other_status_is_not_read() -> None:
    world = world_of(A)
    asked = wish(world)
    tell(world, A, asked)
    write(world, Put(StoreKey(f"status/nodes/{A}/bgp"), b"not ours"), Put(StoreKey("status/x"), b"nor this"))
    assert world.cluster.receipts == {A: model.Receipt(revision=asked)}
    assert world.cluster.receipt_wish == asked
    assert world.cluster.faults == {}
    write(world, Delete(kinds.receipt_of(A)), Delete(kinds.RECEIPT_WISH_KEY), Delete(StoreKey("status/x")))
    assert world.cluster.receipts == {}
    assert world.cluster.receipt_wish == 0
