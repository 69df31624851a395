"""Groups: ids and pools taken at creation, what may change afterwards, and what keeps them (E3, E5–E8, O14–O16)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import FakeCluster, group, network, policy, profile, rule

from weft.domain import kinds, model
from weft.domain.errors import Conflict, Exhausted, Invalid
from weft.domain.ids import StoreKey, TenantName
from weft.domain.lifecycle.changes import groups


def world_with_network(subnet: str = "10.1.1.0/24", gateway: str = "") -> FakeCluster:
    world = FakeCluster()
    world.put(network(subnet=subnet, gateway=gateway))
    return world


@given(st.lists(st.integers(0, 7), max_size=30))
def test_ids_are_unique_lowest_first_and_given_back(steps: list[int]) -> None:
    """W6: they are claims in the store, so no restart or other leader can give one twice."""
    world = world_with_network()
    here: dict[str, int] = {}
    for number in steps:
        name = f"g{number}"
        if name in here:
            world.delete(group(name))
            del here[name]
            continue
        here[name] = world.put(group(name)).group_id
        assert here[name] == min(set(range(1, 10)) - {each for other, each in here.items() if other != name})
    claims = {key for key in world.entries if key.startswith("claims/group-id/")}
    assert claims == {f"claims/group-id/{each}" for each in here.values()}


def test_ids_have_15_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """W6: as much as flow metadata carries."""
    assert groups.GROUP_IDS == (1, 32767)
    monkeypatch.setattr(groups, "GROUP_IDS", (1, 2))
    world = world_with_network()
    world.put(group("a"))
    world.put(group("b"))
    with world.refuses(Exhausted):
        world.put(group("c"))


def test_an_id_stays_when_the_group_changes() -> None:
    world = world_with_network()
    world.put(policy())
    world.put(profile())
    first = world.put(group())
    changed = world.put(group(policies=("p",), net_profile="gold", cfgd_tag="x"))
    assert changed.group_id == first.group_id == 1
    assert (changed.policies, changed.net_profile, changed.cfgd_tag) == (("p",), "gold", "x")


def test_a_tag_of_its_own_is_taken_with_the_group_and_given_back() -> None:
    """contiv 5.1: networks and groups share the cluster's range."""
    world = FakeCluster()
    world.put(network(encap="vlan", pkt_tag=7))
    world.put(group("a", pkt_tag=70))
    assert world.entries[StoreKey("claims/vlan/70")]
    with world.refuses(Conflict, field="pktTag"):
        world.put(group("b", pkt_tag=70))
    with world.refuses(Conflict, field="pktTag"):
        world.put(group("b", pkt_tag=7))
    with world.refuses(Conflict, field="pktTag"):
        world.put(network("red", "10.2.0.0/24", encap="vlan", pkt_tag=70))
    with world.refuses(Conflict, field="vlans"):
        world.put(model.Global(vlans="1-69"))
    with world.refuses(Conflict, field="pktTag"):
        world.put(group("a", pkt_tag=71))
    world.delete(group("a", pkt_tag=70))
    assert {key for key in world.entries if key.startswith("claims/vlan/")} == {"claims/vlan/7"}
    world.put(group("b"))
    assert {key for key in world.entries if key.startswith("claims/vlan/")} == {"claims/vlan/7"}


def test_a_tag_of_its_own_is_a_vlan_tag_of_the_range() -> None:
    world = FakeCluster()
    world.put(model.Global(vlans="1-100"))
    world.put(network())
    world.put(network("red", "10.2.0.0/24", encap="vlan"))
    for wrong in (group(pkt_tag=70), group(network="red", pkt_tag=101), group(network="red", pkt_tag=4095)):
        with world.refuses(Invalid, field="pktTag"):
            world.put(wrong)


def test_network_and_pool_never_change() -> None:
    """E7, O16."""
    world = world_with_network()
    world.put(network("red", "10.2.0.0/24"))
    world.put(group(ip_pool="10.1.1.1-10.1.1.9"))
    with world.refuses(Conflict, field="networkName"):
        world.put(group(network="red", ip_pool="10.1.1.1-10.1.1.9"))
    with world.refuses(Conflict, field="ipPool"):
        world.put(group(ip_pool="10.1.1.1-10.1.1.10"))


@pytest.mark.parametrize(
    ("members", "field"),
    [
        ({"tenant": TenantName("none")}, "tenantName"),
        ({"network": "none"}, "networkName"),
        ({"policies": ("none",)}, "policies"),
        ({"net_profile": "none"}, "netProfile"),
    ],
)
def test_references_must_exist(members: dict[str, object], field: str) -> None:
    world = world_with_network()
    with world.refuses(Invalid, field=field):
        world.put(group(**members))


@given(st.integers(0, 16), st.integers(0, 16), st.integers(0, 16), st.integers(0, 16), st.integers(1, 14))
def test_a_pool_is_usable_and_wholly_unused(first: int, more: int, low: int, wide: int, used: int) -> None:
    """E6, against the plain rule on single addresses."""
    world = world_with_network("10.1.1.0/28", "10.1.1.14")
    other, wanted = range(low, low + wide % 4 + 1), range(first, first + more % 6 + 1)
    usable = set(range(1, 15))
    if set(other) <= usable - {14}:
        world.put(group("other", ip_pool=f"10.1.1.{other[0]}-10.1.1.{other[-1]}"))
    else:
        other = range(0)
    if used not in {*other, 14}:
        world.attach("e1", address=f"10.1.1.{used}")
        taken = {used}
    else:
        taken = set()
    pool = group(ip_pool=f"10.1.1.{wanted[0]}-10.1.1.{wanted[-1]}")
    if not set(wanted) <= usable:
        with world.refuses(Invalid, field="ipPool"):
            world.put(pool)
    elif set(wanted) & ({14} | set(other) | taken):
        with world.refuses(Conflict, field="ipPool"):
            world.put(pool)
    else:
        world.put(pool)


def test_a_group_goes_with_its_endpoints_gone() -> None:
    """E3; rules that name it stay and match nothing from then on (W23)."""
    world = world_with_network()
    before = dict(world.entries)
    world.put(group())
    world.put(policy())
    world.put(rule(from_endpoint_group="web"))
    world.attach("e1", group="web")
    with world.refuses(Conflict):
        world.delete(group())
    world.detach("e1")
    world.delete(group())
    assert world.cluster.get(kinds.RULE, "default", "p", "1") is not None
    world.delete(policy())
    assert world.entries == before
