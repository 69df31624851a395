"""Which external IPs the services of a tenant may have (CVE-2020-8554, CVE-2026-32254, CVE-2026-53935)."""

from __future__ import annotations

import pytest
from tests.support.fake_cluster import FakeCluster, network

from weft.domain import codec, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.errors import Conflict, Invalid
from weft.domain.ids import NodeName, TenantName
from weft.domain.loadbalancer.external_ips import external_ip_policy

BLUE = TenantName("blue")
EVERYTHING = ("0.0.0.0/0", "::/0")


def tenant(*ranges: str, name: str = BLUE) -> model.Tenant:
    return model.Tenant(name=TenantName(name), external_ranges=ranges)


def fault(state: FakeCluster, text: str, *, cluster_ips: tuple[str, ...] = ()) -> str:
    services = {parse_address(each, field="cluster_ips") for each in cluster_ips}
    return external_ip_policy(state.cluster, BLUE).fault(parse_address(text, field="address"), services)


def test_cve_2020_8554_an_external_ip_must_be_in_the_ranges_of_the_tenant() -> None:
    state = FakeCluster()
    state.put(tenant())
    assert fault(state, "198.51.100.7") == "is not in externalRanges of the tenant"
    state.put(tenant("198.51.100.0/24", "203.0.113.5-203.0.113.9", "2001:db8::7"))
    for text in ("198.51.100.7", "203.0.113.5", "203.0.113.9", "2001:db8::7"):
        assert not fault(state, text)
    for text in ("198.51.101.0", "203.0.113.10", "2001:db8::8"):
        assert fault(state, text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("127.0.0.1", "is loopback"),
        ("::1", "is loopback"),
        ("169.254.169.254", "is link-local"),
        ("fe80::1", "is link-local"),
        ("224.0.0.1", "is multicast or reserved"),
        ("ff02::1", "is multicast"),
        ("172.19.3.4", "is in pvtSubnet"),
        ("192.0.2.1", "is an address of node one"),
        ("192.0.2.101", "is an address of node one"),
        ("10.1.1.77", "is in network net1 of tenant default"),
        ("10.96.0.10", "is the cluster IP of a service"),
    ],
)
def test_cve_2026_32254_addresses_in_use_are_never_external_ips(text: str, reason: str) -> None:
    """Even if externalRanges contain them by mistake."""
    state = FakeCluster()
    state.put(tenant(*EVERYTHING))
    state.put(network("net1"))
    node = model.Node(name=NodeName("one"), vtep_ip="192.0.2.1", ctrl_ip="192.0.2.101")
    state.cluster.put(kinds.NODE.store_key("one"), codec.encode(node), 1)
    assert fault(state, text, cluster_ips=("10.96.0.10",)) == reason


def test_cve_2026_53935_no_two_tenants_have_the_same_range() -> None:
    state = FakeCluster()
    state.put(tenant("198.51.100.0/24"))
    with pytest.raises(Conflict, match=r"overlaps 198\.51\.100\.0/24 of tenant 'blue'") as caught:
        state.put(tenant("198.51.100.128-198.51.101.3", name="red"))
    assert caught.value.field == "externalRanges"
    state.put(tenant("198.51.101.0/24", name="red"))


def test_an_invalid_range_is_rejected() -> None:
    with pytest.raises(Invalid) as caught:
        FakeCluster().put(tenant("198.51.100.0/33"))
    assert caught.value.field == "externalRanges"
