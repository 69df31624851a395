"""Which nodes are behind a sync request: never asked, acknowledged, unreachable, or deleted."""

from __future__ import annotations

from tests.support.fake_cluster import FakeCluster

from weft.domain import codec, kinds, model
from weft.domain.ids import NodeName, StoreKey
from weft.domain.lifecycle.sync_status import is_behind, node_status, pending_nodes
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


def request_sync(world: FakeCluster) -> int:
    return write(world, Put(kinds.SYNC_REQUEST_KEY, b"{}"))


def acknowledge(world: FakeCluster, name: NodeName, revision: int, *faults: str) -> None:
    write(world, Put(kinds.applied_key(name), codec.encode(model.SyncStatus(revision=revision, faults=faults))))


def behind(world: FakeCluster, revision: int, *, ignore_unreachable: bool = False) -> list[NodeName]:
    return list(pending_nodes(world.cluster, revision, ignore_unreachable=ignore_unreachable))


def test_a_node_is_behind_until_it_acknowledges_the_request() -> None:
    world = world_of(A, B)
    asked = request_sync(world)
    assert behind(world, asked) == [A, B]
    acknowledge(world, A, asked - 1)
    assert behind(world, asked) == [A, B]
    acknowledge(world, A, asked)
    assert behind(world, asked) == [B]
    acknowledge(world, B, asked + 7)
    assert behind(world, asked) == []


def test_a_silent_node_is_behind_unless_it_is_left_out() -> None:
    world = world_of(A, B)
    asked = request_sync(world)
    write(world, Delete(kinds.alive_node(B)))
    acknowledge(world, A, asked)
    assert behind(world, asked) == [B]
    assert behind(world, asked, ignore_unreachable=True) == []


def test_a_node_that_is_gone_is_not_waited_for() -> None:
    world = world_of(A, B)
    asked = request_sync(world)
    write(world, Delete(kinds.NODE.store_key(A)))
    assert not is_behind(world.cluster, A, asked, ignore_unreachable=False)
    assert behind(world, asked) == [B]


def test_the_lag_of_a_node_counts_from_the_last_request() -> None:
    world = world_of(A)
    assert node_status(world.cluster, A) == {"state": "Ready", "appliedRevision": 0, "lag": 0, "reasons": []}
    asked = request_sync(world)
    acknowledge(world, A, asked)
    assert node_status(world.cluster, A)["lag"] == 0, "writes without a request do not count"
    again = request_sync(world)
    status = node_status(world.cluster, A)
    assert (status["appliedRevision"], status["lag"]) == (asked, again - asked)


def test_faults_are_the_state_until_the_node_falls_silent() -> None:
    world = world_of(A)
    acknowledge(world, A, 1, "the datapath does not follow: no")
    status = node_status(world.cluster, A)
    assert (status["state"], status["reasons"]) == ("NotReady", ["the datapath does not follow: no"])
    stored = world.cluster.get(kinds.NODE, A)
    assert stored is not None
    assert oper_of(world.cluster, kinds.NODE, stored.value)["state"] == "NotReady"
    write(world, Delete(kinds.alive_node(A)))
    assert node_status(world.cluster, A)["state"] == "Unreachable"


def test_sync_statuses_and_requests_are_added_and_removed_and_other_status_is_ignored() -> None:
    world = world_of(A)
    asked = request_sync(world)
    acknowledge(world, A, asked)
    write(world, Put(StoreKey(f"status/nodes/{A}/bgp"), b"not ours"), Put(StoreKey("status/x"), b"nor this"))
    assert world.cluster.sync_statuses == {A: model.SyncStatus(revision=asked)}
    assert world.cluster.sync_request == asked
    assert world.cluster.faults == {}
    write(world, Delete(kinds.applied_key(A)), Delete(kinds.SYNC_REQUEST_KEY), Delete(StoreKey("status/x")))
    assert world.cluster.sync_statuses == {}
    assert world.cluster.sync_request == 0
