"""DNS records of endpoints, groups and services (contiv 7.14, R4)."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import DEFAULT, FakeCluster, endpoint, group, network, service

from weft.domain import model
from weft.domain.dns.names import (
    EMPTY_ENTRY,
    Entry,
    Rank,
    Record,
    Transports,
    Zone,
    endpoint_entry,
    inspect_records,
    service_entry,
)
from weft.domain.dns.zones import tenant_zone


def workload(name: str, *, group: str = "", v4: str = "10.1.1.5", v6: str = "") -> model.Endpoint:
    created = endpoint("e1", group=group, address=v4, address_v6=v6)
    return msgspec.structs.replace(created, container_name=name)


def test_a_container_has_forward_and_reverse_records_r4() -> None:
    entry = endpoint_entry(workload("/Web1", v6="2001:db8::5"))
    assert entry.records == (
        Record("web1", "A", "10.1.1.5", Rank.WORKLOAD),
        Record("web1", "AAAA", "2001:db8::5", Rank.WORKLOAD),
        Record("5.1.1.10.in-addr.arpa", "PTR", "web1", Rank.WORKLOAD),
        Record(f"5{'.0' * 23}.8.b.d.0.1.0.0.2.ip6.arpa", "PTR", "web1", Rank.WORKLOAD),
    )


def test_a_pod_has_a_record_without_its_namespace() -> None:
    assert endpoint_entry(workload("shop/web1")).records[0].name == "web1"


def test_a_member_adds_its_address_to_its_group() -> None:
    assert endpoint_entry(workload("", group="Web-Blue")).records == (
        Record("web-blue", "A", "10.1.1.5", Rank.GROUP),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["", "-a", "a-", "a..b", "a b", "ü", "x" * 64, ".".join(["x" * 60] * 5), "a\n"])
def test_an_invalid_dns_name_has_no_record(name: str) -> None:
    assert endpoint_entry(workload(name)) == EMPTY_ENTRY


@pytest.mark.parametrize(
    "name",
    [
        "github.com",
        "sts.amazonaws.com",
        "foo.payments.svc.cluster.local",
        "5.1.1.10.in-addr.arpa",
        "a.b",
        "localhost",
        "LocalHost",
        "wpad",
        "isatap",
    ],
)
def test_H4_no_workload_shadows_a_name_of_somebody_else(name: str) -> None:
    """Names of workloads are single labels: whatever has dots belongs to the cluster domain or to the outside."""
    assert endpoint_entry(workload(f"shop/{name}")) == EMPTY_ENTRY
    assert endpoint_entry(workload(name)) == EMPTY_ENTRY


@pytest.mark.parametrize(
    "name", ["foo.payments.svc.cluster.local", "Cluster.Local", "5.1.1.10.in-addr.arpa", "arpa", "localhost", "wpad"]
)
def test_H4_groups_and_services_are_not_below_the_cluster_domain_or_reverse_zones(name: str) -> None:
    assert endpoint_entry(workload("", group=name)) == EMPTY_ENTRY
    assert service_entry(service(name, vip="10.1.1.9")) == EMPTY_ENTRY


def test_an_administrator_may_declare_groups_and_services_with_dots() -> None:
    assert endpoint_entry(workload("", group="Web.Blue")).records[0].name == "web.blue"
    assert service_entry(service("shop.example", vip="10.1.1.9")).records[0].name == "shop.example"


@pytest.mark.parametrize("domain", ["k8s", "K8s"])
def test_H4_no_object_has_the_name_of_the_cluster_domain(domain: str) -> None:
    assert endpoint_entry(workload("k8s", group="k8s"), domain=domain) == EMPTY_ENTRY
    assert service_entry(service("k8s", vip="10.1.1.9"), domain=domain) == EMPTY_ENTRY


@given(st.text(max_size=80) | st.from_regex(r"[a-zA-Z0-9_.-]{1,70}", fullmatch=True))
def test_H4_bare_names_are_single_labels_whatever_an_object_is_called(name: str) -> None:
    entry = endpoint_entry(workload(name))
    bare = {record.name for record in entry.records if record.type == "A"}
    assert all("." not in each and 1 <= len(each) <= 63 and each.isascii() for each in bare)
    assert {record.data for record in entry.records if record.type == "PTR"} <= bare


def test_docker_compose_names_are_valid() -> None:
    assert endpoint_entry(workload("shop_web_1")).records[0].name == "shop_web_1"


def test_a_service_has_records_once_it_has_a_vip() -> None:
    assert service_entry(service("shop")) == EMPTY_ENTRY
    assert service_entry(service("shop", vip="10.1.1.9")).records == (
        Record("shop", "A", "10.1.1.9", Rank.SERVICE),
        Record("9.1.1.10.in-addr.arpa", "PTR", "shop", Rank.SERVICE),
    )
    both = service_entry(service("shop", vip="10.1.1.9", ipv6_vip="fd00::9")).records
    assert [(each.type, each.data) for each in both if each.name == "shop"] == [("A", "10.1.1.9"), ("AAAA", "fd00::9")]
    assert [each.data for each in both if each.type == "PTR"] == ["shop", "shop"]


def test_denied_egress_denies_upstream_dns() -> None:
    """CVE-2024-29018: DNS forwarding obeys the workload's egress rules."""
    entry = endpoint_entry(workload("web1", v6="2001:db8::5"), dns_egress_denied=lambda _: Transports.BOTH)
    assert entry.dns_egress_denied == entry.tcp_dns_egress_denied == ("10.1.1.5", "2001:db8::5")
    entry = endpoint_entry(workload("web1"), dns_egress_denied=lambda _: Transports.TCP)
    assert (entry.dns_egress_denied, entry.tcp_dns_egress_denied) == ((), ("10.1.1.5",))
    assert endpoint_entry(workload("web1")).dns_egress_denied == ()


def fake_cluster() -> FakeCluster:
    fake_cluster = FakeCluster()
    fake_cluster.put(network(ipv6_subnet="2001:db8::/64"))
    fake_cluster.put(network("red", "10.2.0.0/16"))
    fake_cluster.put(group())
    fake_cluster.put(service("shop"))
    fake_cluster.attach("e1", group="web")
    fake_cluster.attach("e2", group="web")
    fake_cluster.attach("e3", network="red")
    return fake_cluster


def test_a_zone_has_the_records_of_all_objects_of_the_tenant() -> None:
    zone = tenant_zone(fake_cluster().cluster, DEFAULT)
    assert zone.subnets == ("10.1.1.0/24", "2001:db8::/64", "10.2.0.0/16")
    assert sorted(zone.entries) == ["endpoint:blue:e1", "endpoint:blue:e2", "service:shop"]
    members = [zone.entries[f"endpoint:blue:{name}"].records for name in ("e1", "e2")]
    assert {record.name for records in members for record in records} == {"web"}


def test_a_zone_survives_encoding() -> None:
    zone = tenant_zone(fake_cluster().cluster, DEFAULT)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(zone), type=Zone) == zone


def test_inspected_records_have_the_format_of_contiv() -> None:
    """contiv 6.7: tenant, kind, name; Kubernetes Services under a tenant that does not exist."""
    cluster = Entry((Record("kube.ns.svc.cluster.local", "A", "10.9.0.1", Rank.CLUSTER),))
    zone = Zone(
        {
            "endpoint:blue:e1": endpoint_entry(workload("web1", group="web")),
            "service:shop": service_entry(service("shop", vip="10.1.1.9")),
            "kube": cluster,
        }
    )
    assert inspect_records({DEFAULT: zone}) == {
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
