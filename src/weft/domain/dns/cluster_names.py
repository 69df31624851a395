"""DNS records of Kubernetes Services and pods (Kubernetes DNS-Based Service Discovery, version 1.1.0)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from weft.domain.addresses import Address
from weft.domain.dns.names import Entry, Rank, Record, address_records, forward_and_reverse_records

CLUSTER_DOMAIN = "cluster.local"
# Priority and weight of every SRV record: all targets are equal.
_SRV_PRIORITY_WEIGHT = "0 100"


class ServicePort(NamedTuple):
    """A port of a Kubernetes Service. Only a named port has an SRV record."""

    name: str
    protocol: str
    port: int


class Backend(NamedTuple):
    """A backend of a headless Service."""

    address: Address
    hostname: str = ""


def cluster_service_entry(
    namespace: str, service: str, *, addresses: tuple[Address, ...], ports: Iterable[ServicePort], domain: str
) -> Entry:
    """Return the records of a Service with cluster IPs: A, AAAA, PTR, and SRV for each named port."""
    name = _service_name(namespace, service, domain=domain)
    services = (_srv(port, name, target=name) for port in ports if port.name)
    return Entry((*forward_and_reverse_records(name, addresses, rank=Rank.CLUSTER), *services))


def headless_service_entry(
    namespace: str, service: str, *, backends: Iterable[Backend], ports: Iterable[ServicePort], domain: str
) -> Entry:
    """Return the records of a headless Service: its name resolves to all backends, each with a name below it.

    `ports` are the ports of the backends.
    """
    name = _service_name(namespace, service, domain=domain)
    named_ports = [port for port in ports if port.name]
    records: list[Record] = []
    for backend in backends:
        records += address_records(name, (backend.address,), rank=Rank.CLUSTER)
        backend_name = f"{backend.hostname.lower() or _dashed(backend.address)}.{name}"
        # The specification defines PTR records only for backends with a hostname.
        records_of = forward_and_reverse_records if backend.hostname else address_records
        records += records_of(backend_name, (backend.address,), rank=Rank.CLUSTER)
        records += (_srv(port, name, target=backend_name) for port in named_ports)
    return Entry(tuple(records))


def external_service_entry(namespace: str, service: str, *, target: str, domain: str) -> Entry:
    """Return the CNAME record of a Service of type ExternalName."""
    name = _service_name(namespace, service, domain=domain)
    return Entry((Record(name, "CNAME", target.rstrip(".").lower(), Rank.CLUSTER),))


def pod_entry(namespace: str, *, addresses: Iterable[Address], domain: str) -> Entry:
    """Return the records of a pod by address: `10-1-0-5.namespace.pod.DOMAIN`."""
    records: list[Record] = []
    for address in addresses:
        # Lower case, as all names in a zone: lookups ignore case.
        name = f"{_dashed(address)}.{namespace}.pod.{domain}".lower()
        records += address_records(name, (address,), rank=Rank.CLUSTER)
    return Entry(tuple(records))


def _service_name(namespace: str, service: str, *, domain: str) -> str:
    return f"{service}.{namespace}.svc.{domain}".lower()


def _srv(port: ServicePort, name: str, *, target: str) -> Record:
    owner = f"_{port.name}._{port.protocol}.{name}".lower()
    return Record(owner, "SRV", f"{_SRV_PRIORITY_WEIGHT} {port.port} {target}", Rank.CLUSTER)


def _dashed(address: Address) -> str:
    """Return the address as a DNS label: `10-1-0-5`, `fd00--5`."""
    # A label must not start or end with a hyphen, so `::5` becomes `0--5`.
    label = re.sub(r"[.:]", "-", str(address))
    return f"{'0' * label.startswith('-')}{label}{'0' * label.endswith('-')}"
