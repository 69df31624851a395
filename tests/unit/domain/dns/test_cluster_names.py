"""DNS records of Kubernetes Services and pods, by the specification."""

from __future__ import annotations

import pytest

from weft.domain.addresses import Address, parse_address
from weft.domain.dns.cluster_names import (
    MAX_RECORDS,
    Backend,
    ServicePort,
    cluster_service_entry,
    external_service_entry,
    headless_service_entry,
    pod_entry,
)
from weft.domain.dns.names import CLUSTER_DOMAIN, Entry, Rank

PORTS = (ServicePort("http", "TCP", 80), ServicePort("", "UDP", 53))


def address(text: str) -> Address:
    return parse_address(text, field="test")


def records_of(entry: Entry) -> set[tuple[str, str, str]]:
    assert all(record.rank is Rank.CLUSTER for record in entry.records)
    return {(record.name, record.type, record.data) for record in entry.records}


def test_a_service_with_addresses() -> None:
    entry = cluster_service_entry(
        "ns", "Shop", addresses=(address("10.96.0.7"), address("fd00::7")), ports=PORTS, domain=CLUSTER_DOMAIN
    )
    name = "shop.ns.svc.cluster.local"
    assert records_of(entry) == {
        (name, "A", "10.96.0.7"),
        (name, "AAAA", "fd00::7"),
        ("7.0.96.10.in-addr.arpa", "PTR", name),
        (f"7{'.0' * 27}.0.0.d.f.ip6.arpa", "PTR", name),
        (f"_http._tcp.{name}", "SRV", f"0 100 80 {name}"),
    }


def test_a_headless_service_resolves_to_its_backends() -> None:
    backends = (Backend(address("10.1.0.5"), "db-0"), Backend(address("fd00::6")))
    entry = headless_service_entry("ns", "db", backends=backends, ports=PORTS, domain="example.org")
    name = "db.ns.svc.example.org"
    assert records_of(entry) == {
        (name, "A", "10.1.0.5"),
        (name, "AAAA", "fd00::6"),
        (f"db-0.{name}", "A", "10.1.0.5"),
        (f"fd00--6.{name}", "AAAA", "fd00::6"),
        ("5.0.1.10.in-addr.arpa", "PTR", f"db-0.{name}"),
        (f"_http._tcp.{name}", "SRV", f"0 100 80 db-0.{name}"),
        (f"_http._tcp.{name}", "SRV", f"0 100 80 fd00--6.{name}"),
    }


def test_a_pod_by_its_addresses() -> None:
    addresses = (address("10.1.0.5"), address("fd00::"), address("::5"))
    assert records_of(pod_entry("ns", addresses=addresses, domain=CLUSTER_DOMAIN)) == {
        ("10-1-0-5.ns.pod.cluster.local", "A", "10.1.0.5"),
        ("fd00--0.ns.pod.cluster.local", "AAAA", "fd00::"),
        ("0--5.ns.pod.cluster.local", "AAAA", "::5"),
    }


def test_an_external_name_service_is_a_cname() -> None:
    entry = external_service_entry("ns", "out", target="WWW.example.org.", domain=CLUSTER_DOMAIN)
    assert records_of(entry) == {("out.ns.svc.cluster.local", "CNAME", "www.example.org")}


LONG = "p" * 63


def test_H5_a_port_name_without_room_for_the_underscore_costs_its_own_srv_record() -> None:
    ports = (ServicePort("http", "TCP", 80), ServicePort(LONG, "TCP", 81))
    entry = cluster_service_entry("ns", "shop", addresses=(address("10.96.0.7"),), ports=ports, domain=CLUSTER_DOMAIN)
    assert [record.name for record in entry.records if record.type == "SRV"] == ["_http._tcp.shop.ns.svc.cluster.local"]
    assert {record.type for record in entry.records} == {"A", "PTR", "SRV"}
    assert entry.left_out == 1
    assert LONG in entry.fault


@pytest.mark.parametrize(
    "target", ["x" * 64 + ".example.org", "a..b", "", ".", "a b.org", "ü.org", ".".join(["x" * 60] * 5)]
)
def test_H5_an_external_name_that_dns_cannot_carry_is_left_out(target: str) -> None:
    entry = external_service_entry("ns", "out", target=target, domain=CLUSTER_DOMAIN)
    assert (entry.records, entry.left_out) == ((), 1)
    assert "externalName" in entry.fault


@pytest.mark.parametrize(
    ("namespace", "service"), [("ns", "a.b"), ("a.b", "x"), ("ns", "x" * 64), ("", "x"), ("ns", "x\n")]
)
def test_H4_names_of_services_and_namespaces_are_single_labels(namespace: str, service: str) -> None:
    """`web.payments` in `shop` must not answer as `web` in the namespace `payments.shop`, or below another domain."""
    backends = [Backend(address("10.1.0.5"), "db-0")]
    for entry in (
        cluster_service_entry(namespace, service, addresses=(address("10.9.0.7"),), ports=PORTS, domain=CLUSTER_DOMAIN),
        headless_service_entry(namespace, service, backends=backends, ports=PORTS, domain=CLUSTER_DOMAIN),
        external_service_entry(namespace, service, target="example.org", domain=CLUSTER_DOMAIN),
    ):
        assert (entry.records, entry.left_out) == ((), 1)
    assert not pod_entry("a.b", addresses=(address("10.1.0.5"),), domain=CLUSTER_DOMAIN).records


def test_H5_a_hostname_that_is_no_label_costs_its_own_name() -> None:
    backends = [
        Backend(address("10.1.0.5"), "x" * 64),
        Backend(address("10.1.0.6"), "a.b"),
        Backend(address("10.1.0.7"), "c"),
    ]
    entry = headless_service_entry("ns", "db", backends=backends, ports=(), domain="example.org")
    name = "db.ns.svc.example.org"
    assert {record.data for record in entry.records if record.name == name} == {"10.1.0.5", "10.1.0.6", "10.1.0.7"}
    names = {record.name for record in entry.records if record.type == "A"}
    assert names == {name, f"10-1-0-5.{name}", f"10-1-0-6.{name}", f"c.{name}"}
    assert entry.left_out == 2


def test_H5_the_records_of_one_service_are_limited_and_its_addresses_come_first() -> None:
    """Backends times ports: a slice of 200 KiB would make a million records."""
    backends = [Backend(address(f"10.1.{n >> 8}.{n & 255}")) for n in range(4_000)]
    ports = [ServicePort(f"p{number}", "TCP", number + 1) for number in range(250)]
    entry = headless_service_entry("ns", "db", backends=backends, ports=ports, domain=CLUSTER_DOMAIN)
    assert len(entry.records) == MAX_RECORDS
    assert sum(record.name == "db.ns.svc.cluster.local" for record in entry.records) == 4_000
    assert str(MAX_RECORDS) in entry.fault
