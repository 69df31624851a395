"""What the sets and maps of the host's table hold (`host_rules`), element by element, so that a change costs itself."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from weft.adapters.netns.host.ruleset import HOST_TABLE, HostRules, audience_sets, leading_doors, leading_ports
from weft.domain.host_access.state import ExternalAddress, HostPort, NodePort
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.nft_set import (
    INET,
    Element,
    SetName,
    apply_changes,
    drop_elements,
    key,
    port,
    protocol,
    put_elements,
)
from weft.kernel.netlink.socket import NetlinkSocket


class HostEntry(NamedTuple):
    """An element, and the set or map of the host's table it is in."""

    name: str
    element: Element


def place_of(part: object) -> object:
    """What parts that may come to the same entry have in common."""
    match part:
        case HostPort() | NodePort():
            return part.protocol, part.port
        case ExternalAddress():
            return part.address
    return None


def host_entries_of(rules: HostRules) -> frozenset[HostEntry]:
    """All that is in the sets and maps of a table that was made by these rules, sources of the world apart."""
    return frozenset(_entries(rules))


def _entries(rules: HostRules) -> Iterator[HostEntry]:
    for family in (4, 6):
        yield from map(_port_entry, leading_ports(rules, family))
        for (number, wanted), door in leading_doors(rules, family).items():
            element = Element(key=key(protocol(number), port(wanted)), value=pack_address(door))
            yield HostEntry(f"node_ports{family}", element)
    for name, addresses in audience_sets(rules).items():
        for address in addresses:
            yield HostEntry(f"{name}{address.family}", Element(key=pack_address(address)))


def _port_entry(part: HostPort) -> HostEntry:
    value = key(pack_address(part.target), port(part.target_port))
    asked = protocol(part.protocol), port(part.port)
    if part.address is None:
        return HostEntry(f"ports{part.family}", Element(key=key(*asked), value=value))
    return HostEntry(f"ports_at{part.family}", Element(key=key(pack_address(part.address), *asked), value=value))


def change_host_entries(netlink: NetlinkSocket, *, drop: Set[HostEntry], put: Set[HostEntry]) -> None:
    """Take entries out and put others in, at once; `Refused` when the table is not as it was told."""
    requests = [
        request
        for entries, make in ((drop, drop_elements), (put, put_elements))
        for name in sorted({entry.name for entry in entries})
        for request in make(SetName(INET, HOST_TABLE, name), [each.element for each in entries if each.name == name])
    ]
    apply_changes(netlink, requests)
