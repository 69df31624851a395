"""DNS records of a tenant, grouped by the object that owns them.

The naming scheme is defined here; a server of the records needs no knowledge of containers and groups. A change of one
object is a change of one entry. Services, groups and containers have bare names as in Contiv (contiv 7.14), but case
is ignored. That of a workload is a single label: names with dots belong to the cluster domain, where Kubernetes
Services and pods are, or to the outside, or to what an administrator has declared. If objects of different rank have
the same name, the lowest rank wins.

Names of objects are input from outside. What makes no valid record is left out here, and counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Flag, IntEnum, auto
from typing import Literal

import msgspec

from weft.domain import model
from weft.domain.addresses import Address
from weft.domain.errors import Invalid
from weft.domain.ids import TenantName

RecordType = Literal["A", "AAAA", "CNAME", "PTR", "SRV"]

CLUSTER_DOMAIN = "cluster.local"
# Underscores are not valid in host names, but Docker Compose uses them in container names.
_LABEL_PATTERN = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_LABEL = re.compile(_LABEL_PATTERN)
_NAME = re.compile(rf"{_LABEL_PATTERN}(?:\.{_LABEL_PATTERN})*")
# The limit of RFC 1035 in text form: 255 octets on the wire.
_MAX_NAME = 253
# Single labels with a meaning of their own, which no object may take: the loopback name (RFC 6761), and the names by
# which hosts find a web proxy and an IPv6 router by themselves (the "global query block list" of Microsoft's DNS).
_RESERVED = frozenset({"localhost", "wpad", "isatap"})


class Rank(IntEnum):
    """The precedence of names, lowest first."""

    # Kubernetes Services and pods.
    CLUSTER = 0
    SERVICE = 1
    GROUP = 2
    WORKLOAD = 3


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A resource record. Names are lower case without a trailing dot; SRV data is `priority weight port target`."""

    name: str
    type: RecordType
    data: str
    rank: Rank


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The records of one object, and source addresses whose queries must not be forwarded upstream."""

    records: tuple[Record, ...]
    # Queries over UDP, and those over TCP: each is forwarded by the transport it came by.
    dns_egress_denied: tuple[str, ...] = ()
    tcp_dns_egress_denied: tuple[str, ...] = ()
    # How many records the object should have, but has not, because they are invalid or too many; and why.
    left_out: int = 0
    fault: str = ""


EMPTY_ENTRY = Entry(())


class Zone(msgspec.Struct, frozen=True, array_like=True):
    """All records of a tenant. Reverse queries for its subnets are never forwarded upstream."""

    entries: dict[str, Entry] = {}
    subnets: tuple[str, ...] = ()


class Transports(Flag):
    """The transports of DNS."""

    NONE = 0
    UDP = auto()
    TCP = auto()
    BOTH = UDP | TCP


# Returns by which transports the egress rules of an endpoint deny upstream DNS (CVE-2024-29018).
DnsEgressDenied = Callable[[model.Endpoint], Transports]


def never_denied(_: model.Endpoint) -> Transports:
    """Allow upstream DNS to every endpoint."""
    return Transports.NONE


def endpoint_owner(network: str, endpoint: str) -> str:
    return f"endpoint:{network}:{endpoint}"


def service_owner(name: str) -> str:
    return f"service:{name}"


def endpoint_entry(
    endpoint: model.Endpoint, *, dns_egress_denied: DnsEgressDenied = never_denied, domain: str = CLUSTER_DOMAIN
) -> Entry:
    """Return forward and reverse records of the container name, and the address records of the group name."""
    try:
        addresses = endpoint.addresses
    except Invalid as error:  # its node wrote no valid address: the zone does without this endpoint
        return Entry((), left_out=1, fault=error.message)
    records: list[Record] = []
    # Docker puts a slash before a container's name, and Weft puts the namespace before a pod's.
    if name := bare_name(endpoint.container_name.rpartition("/")[2], domain=domain):
        records += forward_and_reverse_records(name, addresses, rank=Rank.WORKLOAD)
    if group := declared_name(endpoint.group, domain=domain):
        records += address_records(group, addresses, rank=Rank.GROUP)
    denied, sources = dns_egress_denied(endpoint), tuple(map(str, addresses))
    return Entry(
        tuple(records),
        dns_egress_denied=sources if Transports.UDP in denied else (),
        tcp_dns_egress_denied=sources if Transports.TCP in denied else (),
    )


def service_entry(service: model.Service, *, domain: str = CLUSTER_DOMAIN) -> Entry:
    """Return forward and reverse records of the service's VIPs; empty while it has none."""
    name = declared_name(service.name, domain=domain)
    try:
        return Entry(forward_and_reverse_records(name, service.addresses, rank=Rank.SERVICE)) if name else EMPTY_ENTRY
    except Invalid as error:  # a VIP that is no address
        return Entry((), left_out=1, fault=error.message)


# The member of `/inspect/nameserver` for each rank.
_INSPECT_KINDS = {
    Rank.CLUSTER: "services",
    Rank.SERVICE: "services",
    Rank.GROUP: "endpointGroups",
    Rank.WORKLOAD: "commonNames",
}
# Contiv shows Kubernetes names under this tenant, whatever tenant they are in.
_CLUSTER_TENANT = "k8sDefaultTenant"

InspectedRecords = dict[str, dict[str, dict[str, list[str]]]]


def inspect_records(zones: Mapping[TenantName, Zone]) -> InspectedRecords:
    """Return `dnsRecords` of `/inspect/nameserver` (contiv 6.7): tenant -> kind of name -> name -> addresses."""
    records_by_tenant: InspectedRecords = {}
    for tenant, zone in sorted(zones.items()):
        for owner, record in _address_records_in(zone):
            shown_tenant = _CLUSTER_TENANT if record.rank is Rank.CLUSTER else tenant
            by_kind = records_by_tenant.setdefault(
                shown_tenant, {kind: {} for kind in (*_INSPECT_KINDS.values(), "endpoints")}
            )
            by_kind[_INSPECT_KINDS[record.rank]].setdefault(record.name, []).append(record.data)
            if record.rank is Rank.WORKLOAD:
                by_kind["endpoints"].setdefault(owner.removeprefix("endpoint:"), []).append(record.data)
    return records_by_tenant


def _address_records_in(zone: Zone) -> Iterator[tuple[str, Record]]:
    for owner, entry in sorted(zone.entries.items()):
        yield from ((owner, record) for record in entry.records if record.type in {"A", "AAAA"})


def bare_name(text: str, *, domain: str) -> str:
    """Return a workload's name as a single DNS label in lower case, or "" if it may not have one.

    A name with dots would answer in the place of an external name, or of one below the cluster domain.
    """
    label = dns_label(text)
    return "" if label in _RESERVED or label == domain.lower() else label


def declared_name(text: str, *, domain: str) -> str:
    """Return the name of a group or service as a DNS name in lower case, or "" if it may not have one.

    An administrator declares these, so that they may have dots; but not below the cluster domain or the reverse zones.
    """
    name = dns_name(text)
    owned = f".{name}".endswith((f".{domain.lower()}", ".arpa"))
    return "" if name in _RESERVED or owned else name


def dns_label(text: str) -> str:
    """Return the text as a single DNS label in lower case, or "" if it is none."""
    lowered = text.lower()
    return lowered if _LABEL.fullmatch(lowered) else ""


def dns_name(text: str) -> str:
    """Return the text as a DNS name in lower case, or "" if it is none: its labels or all of it may be too long."""
    lowered = text.lower()
    return lowered if len(lowered) <= _MAX_NAME and _NAME.fullmatch(lowered) else ""


def address_records(name: str, addresses: Iterable[Address], *, rank: Rank) -> Iterator[Record]:
    """Return the A and AAAA records of a name."""
    return (Record(name, "A" if address.family == 4 else "AAAA", str(address), rank) for address in addresses)


def forward_and_reverse_records(name: str, addresses: tuple[Address, ...], *, rank: Rank) -> tuple[Record, ...]:
    """Return the A and AAAA records of a name, and the PTR records of its addresses."""
    pointers = (Record(reverse_name(address), "PTR", name, rank) for address in addresses)
    return (*address_records(name, addresses, rank=rank), *pointers)


def reverse_name(address: Address) -> str:
    """Return the `in-addr.arpa` or `ip6.arpa` name of an address."""
    if address.family == 4:
        return ".".join(str(byte) for byte in address.number.to_bytes(4, "little")) + ".in-addr.arpa"
    return ".".join(reversed(f"{address.number:032x}")) + ".ip6.arpa"
