"""The names of Kubernetes' services and pods below the cluster's domain: its DNS-Based Service Discovery, 1.1."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from weft.domain.addresses import Address
from weft.domain.dns.names import Entry, Rank, Record, address_records, both_ways

CLUSTER_DOMAIN = "cluster.local"
# Priority and weight of every SRV record: all are alike.
_SRV_LEAD = "0 100"


class ServicePort(NamedTuple):
    """A port of a Kubernetes service. Only one with a name has a record."""

    name: str
    protocol: str
    port: int


class Backend(NamedTuple):
    """A workload behind a headless service."""

    address: Address
    hostname: str = ""


def cluster_service_entry(
    namespace: str, service: str, *, addresses: tuple[Address, ...], ports: Iterable[ServicePort], domain: str
) -> Entry:
    """A Kubernetes service with addresses of its own: A, AAAA, PTR, and SRV for each named port."""
    name = _service_name(namespace, service, domain=domain)
    services = (_srv(port, name, target=name) for port in ports if port.name)
    return Entry((*both_ways(name, addresses, rank=Rank.CLUSTER), *services))


def headless_service_entry(
    namespace: str, service: str, *, backends: Iterable[Backend], ports: Iterable[ServicePort], domain: str
) -> Entry:
    """A Kubernetes service without an address: its name stands for all backends, each of which has a name below it.

    The ports are those of the backends.
    """
    name = _service_name(namespace, service, domain=domain)
    named_ports = [port for port in ports if port.name]
    records: list[Record] = []
    for backend in backends:
        records += address_records(name, (backend.address,), rank=Rank.CLUSTER)
        own = f"{backend.hostname.lower() or _dashed(backend.address)}.{name}"
        known_back = both_ways if backend.hostname else address_records
        records += known_back(own, (backend.address,), rank=Rank.CLUSTER)
        records += (_srv(port, name, target=own) for port in named_ports)
    return Entry(tuple(records))


def external_service_entry(namespace: str, service: str, *, target: str, domain: str) -> Entry:
    """A Kubernetes service that is another name for something, mostly of the outside."""
    name = _service_name(namespace, service, domain=domain)
    return Entry((Record(name, "CNAME", target.rstrip(".").lower(), Rank.CLUSTER),))


def pod_entry(namespace: str, *, addresses: Iterable[Address], domain: str) -> Entry:
    """A Kubernetes pod by each of its addresses: `10-1-0-5.namespace.pod.DOMAIN`."""
    records: list[Record] = []
    for address in addresses:
        name = f"{_dashed(address)}.{namespace}.pod.{domain}".lower()
        records += address_records(name, (address,), rank=Rank.CLUSTER)
    return Entry(tuple(records))


def _service_name(namespace: str, service: str, *, domain: str) -> str:
    return f"{service}.{namespace}.svc.{domain}".lower()


def _srv(port: ServicePort, name: str, *, target: str) -> Record:
    owner = f"_{port.name}._{port.protocol}.{name}".lower()
    return Record(owner, "SRV", f"{_SRV_LEAD} {port.port} {target}", Rank.CLUSTER)


def _dashed(address: Address) -> str:
    """The address as a label, as cluster DNS writes it: `10-1-0-5`, `fd00--5`; a hyphen stands at neither end."""
    label = re.sub(r"[.:]", "-", str(address))
    return f"{'0' * label.startswith('-')}{label}{'0' * label.endswith('-')}"
