"""Silent nodes are marked at once, and dead ones collected after the limit (W12)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import FakeCluster, endpoint, network

from weft.domain import codec, kinds, model
from weft.domain.errors import Stale
from weft.domain.ids import NodeName
from weft.domain.ipam import ipam
from weft.domain.lifecycle import node_gc
from weft.domain.lifecycle.changes.endpoints import plan_publish
from weft.domain.store_types import Delete, Put, Revision
from weft.domain.transaction import Transaction

NODE = NodeName("n1")
LIMIT = 3600.0


def world_with_node(*, alive: bool = True) -> FakeCluster:
    world = FakeCluster()
    world.carry_out(Transaction((), (Put(kinds.NODE.store_key(NODE), codec.encode(model.Node(name=NODE))),)))
    if alive:
        show(world)
    return world


def show(world: FakeCluster) -> None:
    """The node writes its document and its leased key in one commit."""
    node = Put(kinds.NODE.store_key(NODE), codec.encode(model.Node(name=NODE)))
    world.carry_out(Transaction((), (node, Put(kinds.alive_node(NODE), b""))))


def fall_silent(world: FakeCluster) -> None:
    world.carry_out(Transaction((), (Delete(kinds.alive_node(NODE)),)))


def mark(world: FakeCluster, now: float) -> None:
    for name in list(node_gc.nodes_to_mark(world.cluster)):
        world.carry_out(node_gc.plan_mark(world.reading(), name, now=now))


def unreachable_since(world: FakeCluster) -> float:
    stored = world.cluster.get(kinds.NODE, NODE)
    assert stored is not None
    return stored.value.unreachable_since


def collect(world: FakeCluster, *, seen: float, now: float) -> int:
    """Collect what is due for a leader that first saw the mark at `seen`; how many commits it took."""
    silence = node_gc.Silence()
    silence.observe(world.cluster, now=seen)
    count = 0
    for name, marked in silence.longer_than(LIMIT, now=now):
        while (plan := node_gc.plan_collect(world.reading(), name, marked=marked)).writes:
            world.carry_out(plan)
            count += 1
    return count


def revision(world: FakeCluster) -> Revision:
    stored = world.cluster.get(kinds.NODE, NODE)
    assert stored is not None
    return stored.revision


def test_silence_is_marked_when_it_begins_and_when_it_ends() -> None:
    world = world_with_node()
    mark(world, 100)
    assert unreachable_since(world) == 0
    fall_silent(world)
    assert list(node_gc.nodes_to_mark(world.cluster)) == [NODE]
    mark(world, 100)
    mark(world, 200)
    assert unreachable_since(world) == 100
    show(world)
    mark(world, 300)
    assert unreachable_since(world) == 0


def test_a_node_that_shows_itself_meanwhile_is_not_marked() -> None:
    world = world_with_node(alive=False)
    plan = node_gc.plan_mark(world.reading(), NODE, now=100)
    show(world)
    with pytest.raises(Stale):
        world.carry_out(plan)


def test_a_dead_node_is_collected_with_all_it_had() -> None:
    """Endpoints with claims and from its blocks, the blocks, and last its own document and status."""
    world = world_with_node()
    blue = world.put(network(subnet="10.1.0.0/16"))
    before = {key for key in world.entries if not key.startswith(("nodes/", "alive/"))}
    world.carry_out(Transaction((), (Put(kinds.applied_key(NODE), codec.encode(model.SyncStatus(revision=1))),)))
    for _ in range(node_gc.BATCH + 2):
        reading = world.reading()
        block, writes = ipam.take_block(reading, blue, NODE, family=4)
        world.carry_out(reading.plan(writes))
        for number in range(2):
            address = str(block._replace(number=block.number + number))
            mine = msgspec.structs.replace(endpoint(f"e{address}", address=address), host=NODE)
            world.carry_out(plan_publish(world.reading(), mine))
    fall_silent(world)
    mark(world, 100)
    assert collect(world, seen=7, now=7 + LIMIT) == 0
    assert collect(world, seen=7, now=7.1 + LIMIT) > 3
    assert set(world.entries) == before


def test_endpoints_of_others_stay() -> None:
    world = world_with_node()
    world.put(network())
    world.attach("other")
    before = set(world.entries)
    made = msgspec.structs.replace(world.attach("mine"), host=NODE)
    world.carry_out(Transaction((), (Put(kinds.ENDPOINT.store_key(*made.key), codec.encode(made)),)))
    fall_silent(world)
    mark(world, 100)
    collect(world, seen=100, now=200 + LIMIT)
    assert set(world.entries) == before - {"nodes/n1", "alive/nodes/n1"}


def test_a_node_that_comes_back_keeps_what_is_left() -> None:
    world = world_with_node(alive=False)
    mark(world, 100)
    plan = node_gc.plan_collect(world.reading(), NODE, marked=revision(world))
    show(world)
    with pytest.raises(Stale):
        world.carry_out(plan)
    assert collect(world, seen=100, now=200 + LIMIT) == 0
    assert world.cluster.get(kinds.NODE, NODE) is not None


def test_an_unknown_node_is_nothing_to_do() -> None:
    world = FakeCluster()
    assert node_gc.plan_mark(world.reading(), NODE, now=1) == Transaction()
    assert node_gc.plan_collect(world.reading(), NODE, marked=1) == Transaction()


def test_M4_a_node_that_came_back_meanwhile_is_counted_again() -> None:
    """M4: a short reconnect between two looks begins another silence, whatever the clocks of the leaders say."""
    world = world_with_node()
    silence = node_gc.Silence()
    fall_silent(world)
    mark(world, 100)
    silence.observe(world.cluster, now=0)
    first = revision(world)
    show(world)
    fall_silent(world)
    mark(world, 100)
    silence.observe(world.cluster, now=LIMIT)
    assert not list(silence.longer_than(LIMIT, now=LIMIT + 1))
    assert list(silence.longer_than(LIMIT, now=2 * LIMIT + 1)) == [(NODE, revision(world))]
    assert node_gc.plan_collect(world.reading(), NODE, marked=first) == Transaction()
