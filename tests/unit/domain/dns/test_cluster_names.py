"""DNS records of Kubernetes Services and pods, by the specification."""

from __future__ import annotations

from weft.domain.addresses import Address, parse_address
from weft.domain.dns.cluster_names import (
    CLUSTER_DOMAIN,
    Backend,
    ServicePort,
    cluster_service_entry,
    external_service_entry,
    headless_service_entry,
    pod_entry,
)
from weft.domain.dns.names import Entry, Rank

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
