"""At which outer addresses the services of a tenant may be asked (CVE-2020-8554, CVE-2026-32254, CVE-2026-53935)."""

from __future__ import annotations

import pytest
from tests.support.fake_cluster import FakeCluster, network

from weft.domain import codec, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.errors import Conflict, Invalid
from weft.domain.ids import NodeName, TenantName
from weft.domain.loadbalancer.external_ips import outer_rules

BLUE = TenantName("blue")
EVERYTHING = ("0.0.0.0/0", "::/0")


def tenant(*ranges: str, name: str = BLUE) -> model.Tenant:
    return model.Tenant(name=TenantName(name), external_ranges=ranges)


def fault(world: FakeCluster, text: str, *, own: tuple[str, ...] = ()) -> str:
    services = {parse_address(each, field="own") for each in own}
    return outer_rules(world.cluster, BLUE).fault(parse_address(text, field="address"), services)


def test_cve_2020_8554_an_address_counts_only_where_the_tenant_has_it() -> None:
    world = FakeCluster()
    world.put(tenant())
    assert fault(world, "198.51.100.7") == "is not in externalRanges of the tenant"
    world.put(tenant("198.51.100.0/24", "203.0.113.5-203.0.113.9", "2001:db8::7"))
    for text in ("198.51.100.7", "203.0.113.5", "203.0.113.9", "2001:db8::7"):
        assert not fault(world, text)
    for text in ("198.51.101.0", "203.0.113.10", "2001:db8::8"):
        assert fault(world, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("127.0.0.1", "is loopback"),
        ("::1", "is loopback"),
        ("169.254.169.254", "means something on one link only"),
        ("fe80::1", "means something on one link only"),
        ("224.0.0.1", "is no host's address"),
        ("ff02::1", "is no host's address"),
        ("172.19.3.4", "is in pvtSubnet"),
        ("192.0.2.1", "is that of node one"),
        ("192.0.2.101", "is that of node one"),
        ("10.1.1.77", "is in network net1 of tenant default"),
        ("10.96.0.10", "is that of a service of the cluster"),
    ],
)
def test_cve_2026_32254_nobody_has_what_means_something_here_already(text: str, why: str) -> None:
    """Whatever the tenant was given by mistake."""
    world = FakeCluster()
    world.put(tenant(*EVERYTHING))
    world.put(network("net1"))
    node = model.Node(name=NodeName("one"), vtep_ip="192.0.2.1", ctrl_ip="192.0.2.101")
    world.cluster.put(kinds.NODE.store_key("one"), codec.encode(node), 1)
    assert fault(world, text, own=("10.96.0.10",)) == why


def test_cve_2026_53935_no_two_tenants_have_the_same_range() -> None:
    world = FakeCluster()
    world.put(tenant("198.51.100.0/24"))
    with pytest.raises(Conflict, match=r"overlaps 198\.51\.100\.0/24 of tenant 'blue'") as caught:
        world.put(tenant("198.51.100.128-198.51.101.3", name="red"))
    assert caught.value.field == "externalRanges"
    world.put(tenant("198.51.101.0/24", name="red"))


def test_a_range_that_is_none_is_refused() -> None:
    with pytest.raises(Invalid) as caught:
        FakeCluster().put(tenant("198.51.100.0/33"))
    assert caught.value.field == "externalRanges"
