"""DNS records of Kubernetes Services and pods (Kubernetes DNS-Based Service Discovery, version 1.1.0).

Names, ports and hostnames are what the API server or a node has stored. A record that DNS cannot carry is left out, and
counted in its entry: the API allows a port name of 63 letters, which leaves no room for the underscore before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain, islice
from typing import NamedTuple

from weft.domain.addresses import Address
from weft.domain.dns.names import (
    EMPTY_ENTRY,
    Entry,
    Rank,
    Record,
    address_records,
    dns_label,
    dns_name,
    forward_and_reverse_records,
)

# What one object may have, addresses first. An answer of 64 KiB has room for 4,095 addresses. Without a limit the SRV
# records of one headless Service are the product of its backends and ports: millions, from objects of a few megabytes.
MAX_RECORDS = 8_192
# Priority and weight of every SRV record: all targets are equal.
_SRV_PRIORITY_WEIGHT = "0 100"
# `_` and the name of a port are one label.
_MAX_PORT_NAME = 62
_PORTS = range(1, 1 << 16)


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
    if not name:
        return _unnamed(namespace, service)
    owners, faults = _srv_owners(ports, name)
    services = (_srv(owner, port, target=name) for owner, port in owners)
    return _entry(chain(forward_and_reverse_records(name, addresses, rank=Rank.CLUSTER), services), faults)


def headless_service_entry(
    namespace: str, service: str, *, backends: Collection[Backend], ports: Iterable[ServicePort], domain: str
) -> Entry:
    """Return the records of a headless Service: its name resolves to all backends, each with a name below it.

    `ports` are the ports of the backends.
    """
    name = _service_name(namespace, service, domain=domain)
    if not name:
        return _unnamed(namespace, service)
    owners, faults = _srv_owners(ports, name)
    names: dict[Backend, str] = {}
    for backend in backends:
        hostname = dns_label(backend.hostname)
        below = dns_name(f"{hostname or _dashed(backend.address)}.{name}")
        if not below or (backend.hostname and not hostname):
            faults.append(f"hostname {backend.hostname[:80]!r} makes no DNS name below {name}")
        if below:
            names[backend] = below
    addresses = (backend.address for backend in backends)
    return _entry(
        chain(
            address_records(name, addresses, rank=Rank.CLUSTER),
            chain.from_iterable(_backend_records(backend, below) for backend, below in names.items()),
            (_srv(owner, port, target=below) for below in names.values() for owner, port in owners),
        ),
        faults,
    )


def _backend_records(backend: Backend, name: str) -> Iterable[Record]:
    # The specification defines PTR records only for backends with a hostname.
    records_of = forward_and_reverse_records if dns_label(backend.hostname) else address_records
    return records_of(name, (backend.address,), rank=Rank.CLUSTER)


def external_service_entry(namespace: str, service: str, *, target: str, domain: str) -> Entry:
    """Return the CNAME record of a Service of type ExternalName."""
    name, alias = _service_name(namespace, service, domain=domain), dns_name(target.removesuffix("."))
    if not name:
        return _unnamed(namespace, service)
    if not alias:
        fault = f"externalName {target[:80]!r} is no DNS name: labels have 1 to 63 characters, the name at most 253"
        return Entry((), left_out=1, fault=fault)
    return Entry((Record(name, "CNAME", alias, Rank.CLUSTER),))


def pod_entry(namespace: str, *, addresses: Iterable[Address], domain: str) -> Entry:
    """Return the records of a pod by address: `10-1-0-5.namespace.pod.DOMAIN`."""
    # Lower case, as all names in a zone: lookups ignore case.
    label = dns_label(namespace)
    if not label:
        return EMPTY_ENTRY
    records: list[Record] = []
    for address in addresses:
        if name := dns_name(f"{_dashed(address)}.{label}.pod.{domain}"):
            records += address_records(name, (address,), rank=Rank.CLUSTER)
    return Entry(tuple(records))


def _entry(records: Iterable[Record], faults: list[str]) -> Entry:
    rest = iter(records)
    kept = tuple(islice(rest, MAX_RECORDS))
    # What is beyond the limit is not even counted: to make millions of records only to drop them would take seconds.
    if next(rest, None):
        faults = [*faults, f"more than {MAX_RECORDS} records: use fewer named ports or split the Service"]
    return Entry(kept, left_out=len(faults), fault=faults[0] if faults else "")


def _unnamed(namespace: str, service: str) -> Entry:
    return Entry(
        (), left_out=1, fault=f"{service[:80]!r} in {namespace[:80]!r} makes no name of at most 253 characters"
    )


def _service_name(namespace: str, service: str, *, domain: str) -> str:
    """Return the name of a Service, or "" if its parts are not single labels: `a.b` in `c` is not `a` in `b.c`."""
    labels = dns_label(service), dns_label(namespace)
    return dns_name(f"{labels[0]}.{labels[1]}.svc.{domain}") if all(labels) else ""


def _srv_owners(ports: Iterable[ServicePort], name: str) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the name and number of each port that can have an SRV record, and the faults of the others."""
    owners: list[tuple[str, int]] = []
    faults: list[str] = []
    for port in ports:
        if not port.name:
            continue
        owner = dns_name(f"_{port.name}._{port.protocol}.{name}")
        if owner and dns_label(port.name) and port.port in _PORTS:
            owners.append((owner, port.port))
        else:
            faults.append(
                f"port {port.name[:80]!r}, {port.port}: no SRV record; give it a name of at most {_MAX_PORT_NAME}"
                " letters, digits and inner hyphens"
            )
    return owners, faults


def _srv(owner: str, port: int, *, target: str) -> Record:
    return Record(owner, "SRV", f"{_SRV_PRIORITY_WEIGHT} {port} {target}", Rank.CLUSTER)


def _dashed(address: Address) -> str:
    """Return the address as a DNS label: `10-1-0-5`, `fd00--5`."""
    # A label must not start or end with a hyphen, so `::5` becomes `0--5`.
    label = re.sub(r"[.:]", "-", str(address))
    return f"{'0' * label.startswith('-')}{label}{'0' * label.endswith('-')}"
