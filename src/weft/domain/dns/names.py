"""The names that resolve in a tenant: records, by the object that brings each of them.

The schema is all here; whoever serves the records needs to know nothing of containers and groups. Each object's records
stand alone, so a change of one object is a change of one entry. Bare names as in Contiv (contiv 7.14), but in any case
of letters: services, groups, containers; Kubernetes' services and pods below the cluster's domain. Where objects of
different rank bear the same name, the first rank has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Literal

import msgspec

from weft.domain import model
from weft.domain.addresses import Address
from weft.domain.ids import TenantName

RecordType = Literal["A", "AAAA", "CNAME", "PTR", "SRV"]

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_LONGEST_NAME = 253


class Rank(IntEnum):
    """Who has a name that several bear, first to last."""

    # Kubernetes' services and pods.
    CLUSTER = 0
    SERVICE = 1
    GROUP = 2
    WORKLOAD = 3


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One answer. Names are in lower case without a last dot; an SRV's data is `priority weight port target`."""

    name: str
    type: RecordType
    data: str
    rank: Rank


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """What one object brings: records, and addresses whose questions about the outside must stay unasked."""

    records: tuple[Record, ...]
    dns_egress_denied: tuple[str, ...] = ()


NOTHING = Entry(())


class Zone(msgspec.Struct, frozen=True, array_like=True):
    """All names of a tenant. Reverse lookups in its subnets are never asked outside."""

    entries: dict[str, Entry] = {}
    subnets: tuple[str, ...] = ()


# Whether an endpoint's egress rules forbid it to ask outside (CVE-2024-29018).
KeepsIn = Callable[[model.Endpoint], bool]


def nobody(_: model.Endpoint) -> bool:
    """Everyone may ask outside."""
    return False


def endpoint_owner(network: str, endpoint: str) -> str:
    return f"endpoint:{network}:{endpoint}"


def service_owner(name: str) -> str:
    return f"service:{name}"


def endpoint_entry(endpoint: model.Endpoint, *, dns_egress_denied: KeepsIn = nobody) -> Entry:
    """Its container's name, forth and back, and its part in its group's name."""
    records: list[Record] = []
    # Docker puts a slash before a container's name, and we a pod's namespace.
    if name := dns_name(endpoint.container_name.rpartition("/")[2]):
        records += both_ways(name, endpoint.addresses, rank=Rank.WORKLOAD)
    if group := dns_name(endpoint.group):
        records += address_records(group, endpoint.addresses, rank=Rank.GROUP)
    return Entry(tuple(records), tuple(map(str, endpoint.addresses)) if dns_egress_denied(endpoint) else ())


def service_entry(service: model.Service) -> Entry:
    """The service's own addresses, forth and back; nothing before it has one."""
    name = dns_name(service.name)
    return Entry(both_ways(name, service.addresses, rank=Rank.SERVICE)) if name else NOTHING


_SHOWN = {
    Rank.CLUSTER: "services",
    Rank.SERVICE: "services",
    Rank.GROUP: "endpointGroups",
    Rank.WORKLOAD: "commonNames",
}
_CLUSTER_TENANT = "k8sDefaultTenant"

Shown = dict[str, dict[str, dict[str, list[str]]]]


def show_names(zones: Mapping[TenantName, Zone]) -> Shown:
    """`dnsRecords` of `/inspect/nameserver` (contiv 6.7): tenant -> kind of name -> name -> addresses."""
    shown: Shown = {}
    for tenant, zone in sorted(zones.items()):
        for owner, record in _addresses_of(zone):
            title = _CLUSTER_TENANT if record.rank is Rank.CLUSTER else tenant
            kinds_shown = shown.setdefault(title, {kind: {} for kind in (*_SHOWN.values(), "endpoints")})
            kinds_shown[_SHOWN[record.rank]].setdefault(record.name, []).append(record.data)
            if record.rank is Rank.WORKLOAD:
                kinds_shown["endpoints"].setdefault(owner.removeprefix("endpoint:"), []).append(record.data)
    return shown


def _addresses_of(zone: Zone) -> Iterator[tuple[str, Record]]:
    for owner, entry in sorted(zone.entries.items()):
        yield from ((owner, record) for record in entry.records if record.type in {"A", "AAAA"})


def dns_name(text: str) -> str:
    """The text as a name, or nothing: what objects are called here may be longer than a name's labels can be."""
    lowered = text.lower()
    return lowered if len(lowered) <= _LONGEST_NAME and _NAME.fullmatch(lowered) else ""


def address_records(name: str, addresses: Iterable[Address], *, rank: Rank) -> Iterator[Record]:
    """The addresses of a name."""
    return (Record(name, "A" if address.family == 4 else "AAAA", str(address), rank) for address in addresses)


def both_ways(name: str, addresses: tuple[Address, ...], *, rank: Rank) -> tuple[Record, ...]:
    """The addresses of a name, and the name of each of them."""
    pointers = (Record(reverse_name(each), "PTR", name, rank) for each in addresses)
    return (*address_records(name, addresses, rank=rank), *pointers)


def reverse_name(address: Address) -> str:
    """The name under which the name of an address is looked up."""
    if address.family == 4:
        return ".".join(str(byte) for byte in address.number.to_bytes(4, "little")) + ".in-addr.arpa"
    return ".".join(reversed(f"{address.number:032x}")) + ".ip6.arpa"
