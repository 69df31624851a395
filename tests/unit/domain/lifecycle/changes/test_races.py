"""Two decisions on the same state that must not both happen: the second one's commit does not hold.

Decisions are taken on a snapshot and only their compares keep two masters, or a master and an agent, from undoing each
other. For each pair the world is prepared, both decisions are taken, the first is carried out, and the second must be
`Stale`; taken again, it must be refused or choose something else.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.fake_cluster import (
    DEFAULT,
    FakeCluster,
    endpoint,
    group,
    kind_of,
    network,
    policy,
    profile,
    rule,
    service,
)

from weft.domain import kinds, model
from weft.domain.errors import Stale
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, NodeName, TenantName
from weft.domain.ipam import ipam
from weft.domain.lifecycle import changes
from weft.domain.lifecycle.changes import endpoints
from weft.domain.lifecycle.changes.endpoints import Busy
from weft.domain.transaction import Transaction

Decision = Callable[[FakeCluster], Transaction]

T1 = TenantName("t1")
LARGE = network("large", "10.9.0.0/16")
TWIN = network("red", "10.2.0.0/24")
POOL = group("x", ip_pool="10.1.1.20-10.1.1.30")
POOL_IN_BLOCK = group("x", network="large", ip_pool="10.9.255.130-10.9.255.140")


def put(value: model.Value) -> Decision:
    return lambda world: changes.plan_put(world.reading(), kind_of(value), value)


def delete(value: model.Value) -> Decision:
    kind = kind_of(value)
    return lambda world: changes.plan_delete(world.reading(), kind, *kind.key_parts(value))


def attach(name: str, *, of_group: str = "", address: str = "", on: str = "blue") -> Decision:
    wanted = endpoint(name, group=of_group, address=address, network=on)
    return lambda world: endpoints.plan_create(world.reading(), wanted, busy=Busy())[1]


def detach(name: str) -> Decision:
    key = EndpointKey(DEFAULT, NetworkName("blue"), EndpointId(name))
    return lambda world: endpoints.plan_delete(world.reading(), key)[1]


def reserve(*, asked: str = "", for_group: str = "", on: str = "blue") -> Decision:
    def decide(world: FakeCluster) -> Transaction:
        found = world.cluster.get(kinds.NETWORK, "default", on)
        assert found is not None
        owner = world.cluster.get(kinds.GROUP, "default", for_group)
        asked_for = owner.value if owner else None
        return endpoints.plan_reserve(world.reading(), found.value, asked_for, asked=asked, busy=Busy())[1]

    return decide


def take_block(world: FakeCluster) -> Transaction:
    found = world.cluster.get(kinds.NETWORK, "default", "large")
    assert found is not None
    reading = world.reading()
    return reading.plan(ipam.take_block(reading, found.value, NodeName("n1"), family=4)[1])


def prepared() -> FakeCluster:
    world = FakeCluster()
    world.put(model.Global(fwd_mode="routing"))
    world.put(model.Tenant(name=T1))
    for value in (network(), LARGE, policy(), profile(), group("db"), group("old")):
        world.put(value)
    world.attach("present", group="db")
    return world


PAIRS: dict[str, tuple[Decision, Decision]] = {
    "overlapping subnets": (put(TWIN), put(network("green", "10.2.0.128/25"))),
    "the same name twice": (put(TWIN), put(network("red", "10.3.0.0/24"))),
    "the lowest free tag twice": (put(TWIN), put(network("green", "10.3.0.0/24", tenant=T1))),
    "an explicit tag twice": (put(network("a", "10.2.0.0/24", pkt_tag=9)), put(network("b", "10.3.0.0/24", pkt_tag=9))),
    "a group named as a network": (put(TWIN), put(group("red"))),
    "a network named as a group": (put(group("red")), put(TWIN)),
    "a network of a tenant that goes": (delete(model.Tenant(name=T1)), put(network("x", "10.3.0.0/24", tenant=T1))),
    "a tenant that gets a network": (put(network("x", "10.3.0.0/24", tenant=T1)), delete(model.Tenant(name=T1))),
    "a tenant that gets a policy": (put(policy(tenant=T1)), delete(model.Tenant(name=T1))),
    "a tenant that gets a profile": (put(profile(tenant=T1)), delete(model.Tenant(name=T1))),
    "a policy of a tenant that goes": (delete(model.Tenant(name=T1)), put(policy(tenant=T1))),
    "a group of a network that goes": (delete(LARGE), put(group("x", network="large"))),
    "a network that gets a group": (put(group("x", network="large")), delete(LARGE)),
    "a network that gets a service": (put(service(network="large")), delete(LARGE)),
    "a network that gets an endpoint": (attach("e1", on="large"), delete(LARGE)),
    "a network that gets a reservation": (reserve(on="large"), delete(LARGE)),
    "a network that gets a block": (take_block, delete(LARGE)),
    "an endpoint of a network that goes": (delete(LARGE), attach("e1", on="large")),
    "a reservation of a network that goes": (delete(LARGE), reserve(on="large")),
    "a service of a network that goes": (delete(LARGE), put(service(network="large"))),
    "a block of a network that goes": (delete(LARGE), take_block),
    "group ids twice": (put(group("x")), put(group("y"))),
    "overlapping pools": (put(POOL), put(group("y", ip_pool="10.1.1.30"))),
    "a pool with an address just taken": (attach("e1", address="10.1.1.25"), put(POOL)),
    "an address of a pool just made": (put(POOL), attach("e1", address="10.1.1.25")),
    "a pool in a block just taken": (take_block, put(POOL_IN_BLOCK)),
    "a block with a pool just made": (put(POOL_IN_BLOCK), take_block),
    "a block with a claim just made": (attach("e1", on="large", address="10.9.255.130"), take_block),
    "a claim in a block just taken": (take_block, attach("e1", on="large", address="10.9.255.130")),
    "a block twice": (take_block, take_block),
    "a group that gets an endpoint": (attach("e1", of_group="old"), delete(group("old"))),
    "an endpoint of a group that goes": (delete(group("old")), attach("e1", of_group="old")),
    "a group that gets a reservation": (reserve(for_group="old"), delete(group("old"))),
    "a reservation for a group that goes": (delete(group("old")), reserve(for_group="old")),
    "a policy that is attached": (put(group("y", policies=("p",))), delete(policy())),
    "attaching a policy that goes": (delete(policy()), put(group("y", policies=("p",)))),
    "a rule of a policy that goes": (delete(policy()), put(rule())),
    "a rule from a group that goes": (delete(group("old")), put(rule(from_endpoint_group="old"))),
    "a rule from a network that goes": (delete(LARGE), put(rule(from_network="large"))),
    "the same rule id twice": (put(rule()), put(rule(action="deny"))),
    "a profile that is used": (put(group("y", net_profile="gold")), delete(profile())),
    "using a profile that goes": (delete(profile()), put(group("y", net_profile="gold"))),
    "the lowest address twice": (attach("e1"), attach("e2")),
    "an address asked for twice": (attach("e1", address="10.1.1.7"), attach("e2", address="10.1.1.7")),
    "the same endpoint twice": (attach("e1"), attach("e1")),
    "a service at an address just taken": (attach("e1", address="10.1.1.7"), put(service(ip_address="10.1.1.7"))),
    "two services at the lowest address": (put(service("a")), put(service("b"))),
    "a reserved address twice": (reserve(asked="10.1.1.7"), reserve(asked="10.1.1.7")),
    "an endpoint deleted twice": (detach("present"), detach("present")),
    "a tag outside a range just narrowed": (
        put(model.Global(fwd_mode="routing", vxlans="1-50")), put(network("red", "10.2.0.0/24", pkt_tag=60)),
    ),
    "a range without a tag just taken": (
        put(network("red", "10.2.0.0/24", pkt_tag=60)), put(model.Global(fwd_mode="routing", vxlans="1-50")),
    ),
    "changing what was just changed": (put(policy(mode="audit")), delete(policy())),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second"), PAIRS.values(), ids=PAIRS)
def test_of_two_decisions_that_clash_only_one_happens(first: Decision, second: Decision) -> None:
    world = prepared()
    one, other = first(world), second(world)
    assert one.writes
    assert other.writes
    world.carry_out(one)
    before = dict(world.entries)
    with pytest.raises(Stale):
        world.carry_out(other)
    assert world.entries == before


def test_the_mode_of_a_cluster_and_its_first_network() -> None:
    for first, second in (
        (put(model.Global(fwd_mode="bridge")), put(network())),
        (put(network()), put(model.Global(fwd_mode="bridge"))),
        (put(network()), put(model.Global(pvt_subnet="172.20.0.0/16"))),
    ):
        world = FakeCluster()
        world.put(model.Global())
        one, other = first(world), second(world)
        world.carry_out(one)
        with pytest.raises(Stale):
            world.carry_out(other)


def test_decisions_that_do_not_clash_both_happen() -> None:
    """What is apart is not held up: endpoints with addresses of their own, objects of other tenants."""
    for first, second in (
        (attach("e1", address="10.1.1.7"), attach("e2", address="10.1.1.8")),
        (put(policy("q")), put(policy("r"))),
        (put(policy("q", tenant=T1)), put(group("y"))),
        (attach("e1"), put(rule())),
        (detach("present"), attach("e1", address="10.1.1.8")),
    ):
        world = prepared()
        one, other = first(world), second(world)
        world.carry_out(one)
        world.carry_out(other)
