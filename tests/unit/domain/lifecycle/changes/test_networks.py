"""Networks: tags and subnets taken at creation, all given back at the end (O3–O6, contiv 2.3, 5)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import FakeCluster, endpoint, group, network, service

from weft.domain import model
from weft.domain.errors import Conflict, Exhausted, Invalid
from weft.domain.ids import TenantName
from weft.domain.lifecycle.changes import endpoints


def tags(stored: model.Network) -> tuple[int, int]:
    assert stored.tags is not None
    return stored.tags.vlan, stored.tags.vni


def test_o4_vlan_and_vxlan_count_apart() -> None:
    world = FakeCluster()
    assert tags(world.put(network("v", "10.2.0.0/24", encap="vlan"))) == (1, 0)
    assert tags(world.put(network("x", "10.3.0.0/24"))) == (1, 1)
    assert tags(world.put(network("y", "10.4.0.0/24", pkt_tag=1000))) == (2, 1000)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["vlan", "vxlan"]), st.integers(0, 6)), max_size=25))
def test_tags_are_the_lowest_free_ones_and_never_twice(steps: list[tuple[bool, str, int]]) -> None:
    """Networks come with and without a requested, and go; what is left at the end holds exactly its own claims."""
    world = FakeCluster()
    here: dict[str, model.Network] = {}
    for number, (create, encap, requested) in enumerate(steps):
        if not create and here:
            world.delete(here.pop(sorted(here)[requested % len(here)]))
            continue
        used = {tags(one)[encap == "vxlan"] for one in here.values() if one.encap == encap}
        wanted = network(f"n{number}", f"10.{number}.0.0/24", encap=encap, pkt_tag=requested)
        if requested in used:
            with world.refuses(Conflict, field="pktTag"):
                world.put(wanted)
            continue
        stored = here[wanted.name] = world.put(wanted)
        lowest = next(each for each in range(1, 100) if each not in used)
        assert tags(stored)[encap == "vxlan"] == (requested or lowest)
    claims = {key for key in world.entries if key.startswith("claims/")}
    expected = set()
    for one in here.values():
        local, vni = tags(one)
        expected |= (
            {f"claims/vlan/{local}"} if one.encap == "vlan" else {f"claims/vni/{vni}", f"claims/local-vlan/{local}"}
        )
    assert claims == expected


def test_tags_stay_within_the_ranges_of_the_cluster() -> None:
    world = FakeCluster()
    world.put(model.Global(vlans="5-6", vxlans="70-70"))
    assert tags(world.put(network("a", "10.2.0.0/24", encap="vlan"))) == (5, 0)
    assert tags(world.put(network("b", "10.3.0.0/24"))) == (1, 70)
    with world.refuses(Invalid, field="pktTag"):
        world.put(network("c", "10.4.0.0/24", encap="vlan", pkt_tag=7))
    with world.refuses(Exhausted):
        world.put(network("c", "10.4.0.0/24"))


def test_a_network_never_changes() -> None:
    world = FakeCluster()
    stored = world.put(network(gateway="10.1.1.254"))
    assert world.put(network(gateway="10.1.1.254")) == stored
    for member, other in (
        ("subnet", network(subnet="10.1.1.0/25", gateway="10.1.1.1")),
        ("gateway", network(gateway="10.1.1.253")),
        ("pktTag", network(gateway="10.1.1.254", pkt_tag=5)),
        ("ipv6Subnet", network(gateway="10.1.1.254", ipv6_subnet="fd00::/64")),
        ("nwType", network(gateway="10.1.1.254", nw_type="infra")),
    ):
        with world.refuses(Conflict, field=member):
            world.put(other)


def test_the_tenant_must_exist() -> None:
    world = FakeCluster()
    with world.refuses(Invalid, field="tenantName"):
        world.put(network(tenant=TenantName("none")))


def test_a_network_goes_when_nothing_needs_it() -> None:
    world = FakeCluster()
    before = dict(world.entries)
    world.put(network(subnet="10.1.0.0/16", ipv6_subnet="fd00::/64"))
    world.put(group())
    with world.refuses(Conflict):
        world.delete(network())
    world.delete(group())
    world.put(service())
    with world.refuses(Conflict):
        world.delete(network())
    world.delete(service())
    world.attach("e1")
    with world.refuses(Conflict):
        world.delete(network())
    world.detach("e1")
    world.delete(network())
    assert world.entries == before


@pytest.mark.parametrize("subnet", ["10.1.1.0/24", "10.1.0.0/16"])
def test_hosts_of_an_infra_network_go_with_it(subnet: str) -> None:
    """contiv 6.4: active endpoints of nodes do not block; one of anybody else does."""
    world = FakeCluster()
    before = dict(world.entries)
    world.put(network(subnet=subnet, nw_type="infra"))
    for node in ("node-1", "node-2"):
        wanted = msgspec.structs.replace(endpoint(node), host=node)
        _, plan = endpoints.plan_create(world.reading(), wanted=wanted, busy=endpoints.Busy())
        world.carry_out(plan)
    world.attach("guest")
    with world.refuses(Conflict):
        world.delete(network())
    world.detach("guest")
    world.delete(network())
    assert world.entries == before
