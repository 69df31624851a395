"""Parts of the node view in the kernel's terms: which addresses, routes, neighbours and elements each part is (pure).

A part is there when all its facts are. No fact belongs to two parts, so parts come and go independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from weft.adapters.netns.host.entries import (
    ground_route,
    homeward_entries,
    host_entries,
    link_entries,
    link_neighbours,
    link_routes,
)
from weft.adapters.netns.nft.anti_spoofing import segment_entry, spoofguard_entries
from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.policy_chains import BRIDGE_PREFIX, INSIDE, OVERLAY_PREFIX
from weft.adapters.netns.nft.policy_maps import entries_of
from weft.adapters.netns.nft.service_maps import service_entries
from weft.domain.addresses import BITS, Address, parse_address
from weft.domain.desired.segments import RemoteMac, Segment
from weft.domain.desired.state import Gateway, Port, RemoteRoute, StateItem, VxlanPeer
from weft.domain.host_access.state import (
    HostLink,
    NodePortVip,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.domain.loadbalancer.state import Backend, Frontend, Vip
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, VerdictCounter
from weft.kernel.netlink.link import LOOPBACK
from weft.kernel.netlink.neigh import EVERYONE, Forwarding, Neighbour
from weft.kernel.netlink.route import LinkAddress, Prefix, Route

T = TypeVar("T")

# The group of devices that are as good as gone.
REAPED_GROUP = 87
# Of every host end: workloads move between nodes and never notice.
PORT_MAC = "ee:ee:ee:ee:ee:ee"
# What a next hop in a space is called. It is a group's: the kernel forwards nothing that came to one, until the table
# has said that it may. So where somebody has taken the table away nothing passes.
HOP_MAC = "ef:ee:ee:ee:ee:ee"
NODE_V4 = Address(4, 0xA9FE0101)  # 169.254.1.1
NODE_V6 = Address(6, 0xFE80 << 112 | 1)  # fe80::1
_NEXT_HOP_LEAD = 0xFE80 << 112 | 0x7766 << 32  # fe80::7766:a.b.c.d


# The parts that are nothing but entries, and may be very many.
ENTRY_PARTS = (IpIdentity, CidrIdentity, PolicyEntry, VerdictCounter, Backend, Frontend, Vip)


Fact = LinkAddress | Route | Neighbour | Forwarding | Entry


class KernelState(msgspec.Struct, frozen=True):
    """What a set of parts is made of, besides devices."""

    addresses: frozenset[LinkAddress] = frozenset()
    routes: frozenset[Route] = frozenset()
    neighbours: frozenset[Neighbour] = frozenset()
    forwardings: frozenset[Forwarding] = frozenset()
    entries: frozenset[Entry] = frozenset()


def overlay_name(vni: int) -> str:
    return f"{OVERLAY_PREFIX}{vni}"


def segment_name(number: int) -> str:
    return f"{BRIDGE_PREFIX}{number}"


def overlay_mac(vtep: Address) -> str:
    """The MAC of a node's end of any overlay: made from its address, so nobody has to be asked for it."""
    return "02:77:" + ":".join(f"{byte:02x}" for byte in (vtep.number & 0xFFFFFFFF).to_bytes(4, "big"))


def overlay_hop_mac(vtep: Address) -> str:
    """What others call that end: a group's MAC, for the reason that `HOP_MAC` has."""
    return "03:" + overlay_mac(vtep).removeprefix("02:")


def next_hop(vtep: Address) -> Address:
    """A peer as routes name it: one address for both families, on the overlay only."""
    return Address(6, _NEXT_HOP_LEAD | vtep.number & 0xFFFFFFFF)


def host_prefix(address: Address) -> Prefix:
    return Prefix(address, BITS[address.family])


def facts_of(parts: Iterable[StateItem], indexes: Mapping[str, int]) -> KernelState:
    """The facts of the parts. `indexes` are those of the space's devices; what needs a missing one is left out."""
    entries: set[Entry] = set()
    others: list[Fact] = []
    for part in parts:
        match part:  # what there may be tens of thousands of comes first
            case IpIdentity() | CidrIdentity() | PolicyEntry() | VerdictCounter():
                entries.update(entries_of(part))
            case Backend() | Frontend() | Vip():
                entries.update(service_entries(part))
            case _:
                others += _facts(part, indexes)
    return KernelState(
        addresses=_those(LinkAddress, others),
        routes=_those(Route, others),
        neighbours=_those(Neighbour, others),
        forwardings=_those(Forwarding, others),
        entries=_those(Entry, others) | entries,
    )


def _those(kind: type[T], facts: Iterable[Fact]) -> frozenset[T]:
    return frozenset(fact for fact in facts if isinstance(fact, kind))


def _facts(part: StateItem, indexes: Mapping[str, int]) -> Iterator[Fact]:
    """The facts of a part of which there are not very many."""
    match part:
        case Segment():
            yield segment_entry(segment_name(part.number))
        case Gateway() if link := indexes.get(segment_name(part.segment)) if part.segment else LOOPBACK:
            yield LinkAddress(link=link, prefix=host_prefix(part.address), prefix_route=False)
        case VxlanPeer() if link := indexes.get(overlay_name(part.vni)):
            yield from _peer_facts(part, link=link, bridge=indexes.get(segment_name(part.vni), 0))
        case RemoteRoute() if link := indexes.get(overlay_name(part.vni)):
            to = Prefix(Address(part.prefix.family, part.prefix.base), part.prefix.length)
            yield Route(to=to, link=link, via=next_hop(parse_address(part.vtep, field="vtep")), on_link=True)
        case RemoteMac() if link := indexes.get(overlay_name(part.vni)):
            yield from _station_facts(part, link=link, bridge=indexes.get(segment_name(part.vni), 0))
        case Port() if link := indexes.get(part.interface):
            yield from port_routes(part, indexes)
            yield from port_neighbours(part, indexes)
            yield from port_forwardings(part, link)
            yield from spoofguard_entries(part)
        case HostLink() if link := indexes.get(INSIDE):
            yield from link_routes(link)
            yield from link_neighbours(link)
            yield from link_entries(part)
        case TenantSubnet():
            yield ground_route(part)
        case RemoteHostReturnRoute() if INSIDE in indexes:
            bridge, overlay = indexes.get(segment_name(part.vni)), indexes.get(overlay_name(part.vni))
            if link := bridge or overlay:
                mac = _peer_mac(parse_address(part.vtep, field="vtep"), bridged=bool(bridge))
                yield Neighbour(link=link, address=part.address, mac=mac)
                yield from homeward_entries(part, link=link)
        case TenantSnat() | OverlapDnat() | NodePortVip():
            yield from host_entries(part)


def _peer_facts(part: VxlanPeer, *, link: int, bridge: int) -> Iterator[Fact]:
    vtep = parse_address(part.vtep, field="vtep")
    mac = _peer_mac(vtep, bridged=bool(bridge))
    yield Neighbour(link=bridge or link, address=next_hop(vtep), mac=mac)
    yield Forwarding(link=link, mac=mac, remote=vtep)
    if bridge:
        yield Forwarding(link=link, mac=mac)
    if part.floods:
        yield Forwarding(link=link, mac=EVERYONE, remote=vtep)


def _peer_mac(vtep: Address, *, bridged: bool) -> str:
    return overlay_mac(vtep) if bridged else overlay_hop_mac(vtep)


def _station_facts(part: RemoteMac, *, link: int, bridge: int) -> Iterator[Fact]:
    yield Forwarding(link=link, mac=part.mac, remote=parse_address(part.vtep, field="vtep"))
    yield Forwarding(link=link, mac=part.mac)
    for address in part.addresses if bridge else ():
        yield Neighbour(link=bridge, address=address, mac=part.mac)
        yield Route(to=host_prefix(address), link=bridge)


def port_routes(port: Port, indexes: Mapping[str, int]) -> set[Route]:
    """The way to a workload from its node."""
    return {Route(to=host_prefix(address), link=link) for link in _way(port, indexes) for address in port.addresses}


def port_neighbours(port: Port, indexes: Mapping[str, int]) -> set[Neighbour]:
    """Who is behind the host end, or on the segment: nobody has to ask."""
    return {
        Neighbour(link=link, address=address, mac=port.mac)
        for link in _way(port, indexes)
        for address in port.addresses
    }


def port_forwardings(port: Port, link: int) -> set[Forwarding]:
    """Where the frames of who is on a segment go."""
    return {Forwarding(link=link, mac=port.mac)} if port.segment else set()


def _way(port: Port, indexes: Mapping[str, int]) -> tuple[int, ...]:
    """The device by which a workload is reached, if it is there."""
    link = indexes.get(segment_name(port.segment) if port.segment else port.interface)
    return (link,) if link else ()
