"""What objects bring to a tenant's names (contiv 7.14, R4)."""

from __future__ import annotations

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, endpoint, group, network, service

from weft.domain import model
from weft.domain.dns.names import NOTHING, Entry, Rank, Record, Zone, endpoint_entry, service_entry, show_names
from weft.domain.dns.zones import tenant_zone


def workload(name: str, *, group: str = "", v4: str = "10.1.1.5", v6: str = "") -> model.Endpoint:
    made = endpoint("e1", group=group, address=v4, address_v6=v6)
    return msgspec.structs.replace(made, container_name=name)


def test_a_container_is_known_by_its_name_and_by_its_addresses_r4() -> None:
    entry = endpoint_entry(workload("/Web1", v6="2001:db8::5"))
    assert entry.records == (
        Record("web1", "A", "10.1.1.5", Rank.WORKLOAD),
        Record("web1", "AAAA", "2001:db8::5", Rank.WORKLOAD),
        Record("5.1.1.10.in-addr.arpa", "PTR", "web1", Rank.WORKLOAD),
        Record(f"5{'.0' * 23}.8.b.d.0.1.0.0.2.ip6.arpa", "PTR", "web1", Rank.WORKLOAD),
    )


def test_a_pod_is_known_by_its_own_name() -> None:
    assert endpoint_entry(workload("shop/web1")).records[0].name == "web1"


def test_a_member_adds_its_address_to_its_group() -> None:
    assert endpoint_entry(workload("", group="Web.Blue")).records == (
        Record("web.blue", "A", "10.1.1.5", Rank.GROUP),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["", "-a", "a-", "a..b", "a b", "ü", "x" * 64, ".".join(["x" * 60] * 5), "a\n"])
def test_what_cannot_be_a_name_is_none(name: str) -> None:
    assert endpoint_entry(workload(name)) == NOTHING


def test_docker_compose_names_are_names() -> None:
    assert endpoint_entry(workload("shop_web_1")).records[0].name == "shop_web_1"


def test_a_service_is_known_when_it_has_an_address() -> None:
    assert service_entry(service("shop")) == NOTHING
    assert service_entry(service("shop", vip="10.1.1.9")).records == (
        Record("shop", "A", "10.1.1.9", Rank.SERVICE),
        Record("9.1.1.10.in-addr.arpa", "PTR", "shop", Rank.SERVICE),
    )
    both = service_entry(service("shop", vip="10.1.1.9", ipv6_vip="fd00::9")).records
    assert [(each.type, each.data) for each in both if each.name == "shop"] == [("A", "10.1.1.9"), ("AAAA", "fd00::9")]
    assert [each.data for each in both if each.type == "PTR"] == ["shop", "shop"]


def test_whoever_may_not_go_out_may_not_ask_outside() -> None:
    """CVE-2024-29018: the resolver obeys the workload's own egress rules."""
    entry = endpoint_entry(workload("web1", v6="2001:db8::5"), dns_egress_denied=lambda _: True)
    assert entry.dns_egress_denied == ("10.1.1.5", "2001:db8::5")
    assert endpoint_entry(workload("web1")).dns_egress_denied == ()


def world() -> FakeCluster:
    world = FakeCluster()
    world.put(network(ipv6_subnet="2001:db8::/64"))
    world.put(network("red", "10.2.0.0/16"))
    world.put(group())
    world.put(service("shop"))
    world.attach("e1", group="web")
    world.attach("e2", group="web")
    world.attach("e3", network="red")
    return world


def test_a_zone_is_what_all_objects_of_the_tenant_bring() -> None:
    zone = tenant_zone(world().cluster, DEFAULT)
    assert zone.subnets == ("10.1.1.0/24", "2001:db8::/64", "10.2.0.0/16")
    assert sorted(zone.entries) == ["endpoint:blue:e1", "endpoint:blue:e2", "service:shop"]
    members = [zone.entries[f"endpoint:blue:{name}"].records for name in ("e1", "e2")]
    assert {record.name for records in members for record in records} == {"web"}


def test_a_zone_survives_the_way_to_netdns() -> None:
    zone = tenant_zone(world().cluster, DEFAULT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(zone), type=Zone) == zone


def test_names_are_shown_as_contiv_did() -> None:
    """contiv 6.7: tenant, kind, name; services of Kubernetes below a tenant that is none."""
    cluster = Entry((Record("kube.ns.svc.cluster.local", "A", "10.9.0.1", Rank.CLUSTER),))
    zone = Zone(
        {
            "endpoint:blue:e1": endpoint_entry(workload("web1", group="web")),
            "service:shop": service_entry(service("shop", vip="10.1.1.9")),
            "kube": cluster,
        }
    )
    assert show_names({DEFAULT: zone}) == {
        "default": {
            "services": {"shop": ["10.1.1.9"]},
            "endpointGroups": {"web": ["10.1.1.5"]},
            "commonNames": {"web1": ["10.1.1.5"]},
            "endpoints": {"blue:e1": ["10.1.1.5"]},
        },
        "k8sDefaultTenant": {
            "services": {"kube.ns.svc.cluster.local": ["10.9.0.1"]},
            "endpointGroups": {},
            "commonNames": {},
            "endpoints": {},
        },
    }
