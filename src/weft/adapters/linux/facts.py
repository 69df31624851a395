"""Parts of the node view in the kernel's terms: which addresses, routes, neighbours and elements each part is (pure).

A part is there when all its facts are. No fact belongs to two parts, so parts come and go independently.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from weft.adapters.linux.entries import Entry
from weft.adapters.linux.host_entries import (
    ground_route,
    homeward_route,
    host_entries,
    link_entries,
    link_neighbours,
    link_routes,
)
from weft.adapters.linux.hosting import INSIDE
from weft.adapters.linux.judging import OVERLAY_PREFIX
from weft.adapters.linux.links import LOOPBACK
from weft.adapters.linux.neighbours import Forwarding, Neighbour
from weft.adapters.linux.policy import entries_of
from weft.adapters.linux.routes import LinkAddress, Prefix, Route
from weft.adapters.linux.services import service_entries
from weft.adapters.linux.voices import voices_of
from weft.domain.addresses import BITS, Address, parse_address
from weft.domain.balancing.parts import Backend, Frontend, Vip
from weft.domain.hosting.parts import Alias, Disguise, Door, Ground, Homeward, HostLink
from weft.domain.nodeview import Gateway, Part, Peer, Port, Remote
from weft.domain.policy.parts import Row, Tally, Where, Who

REAPED_GROUP = 87
"""The group of devices that are as good as gone."""
PORT_MAC = "ee:ee:ee:ee:ee:ee"
"""Of every host end: workloads move between nodes and never notice."""
HOP_MAC = "ef:ee:ee:ee:ee:ee"
"""What a next hop in a space is called. It is a group's: the kernel forwards nothing that came to one, until the table
has said that it may. So where somebody has taken the table away nothing passes."""
NODE_V4 = Address(4, 0xA9FE0101)  # 169.254.1.1
NODE_V6 = Address(6, 0xFE80 << 112 | 1)  # fe80::1
_NEXT_HOP_LEAD = 0xFE80 << 112 | 0x7766 << 32  # fe80::7766:a.b.c.d


ENTRY_PARTS = (Who, Where, Row, Tally, Backend, Frontend, Vip)
"""The parts that are nothing but entries, and may be very many."""


class Facts(msgspec.Struct, frozen=True):
    """What a set of parts is made of, besides devices."""

    addresses: frozenset[LinkAddress] = frozenset()
    routes: frozenset[Route] = frozenset()
    neighbours: frozenset[Neighbour] = frozenset()
    forwardings: frozenset[Forwarding] = frozenset()
    entries: frozenset[Entry] = frozenset()


def overlay_name(vni: int) -> str:
    return f"{OVERLAY_PREFIX}{vni}"


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


def facts_of(parts: Iterable[Part], indexes: Mapping[str, int]) -> Facts:
    """The facts of the parts. `indexes` are those of the space's devices; what needs a missing one is left out."""
    addresses: set[LinkAddress] = set()
    routes: set[Route] = set()
    neighbours: set[Neighbour] = set()
    forwardings: set[Forwarding] = set()
    entries: set[Entry] = set()
    for part in parts:
        match part:  # what there may be tens of thousands of comes first
            case Who() | Where() | Row() | Tally():
                entries.update(entries_of(part))
            case Backend() | Frontend() | Vip():
                entries.update(service_entries(part))
            case Gateway():
                addresses.add(LinkAddress(link=LOOPBACK, prefix=host_prefix(part.address), prefix_route=False))
            case Peer() if link := indexes.get(overlay_name(part.vni)):
                vtep = parse_address(part.vtep, field="vtep")
                neighbours.add(Neighbour(link=link, address=next_hop(vtep), mac=overlay_hop_mac(vtep)))
                forwardings.add(Forwarding(link=link, mac=overlay_hop_mac(vtep), remote=vtep))
            case Remote() if link := indexes.get(overlay_name(part.vni)):
                to = Prefix(Address(part.prefix.family, part.prefix.base), part.prefix.length)
                via = next_hop(parse_address(part.vtep, field="vtep"))
                routes.add(Route(to=to, link=link, via=via, on_link=True))
            case Port() if link := indexes.get(part.interface):
                routes |= port_routes(part, link)
                neighbours |= port_neighbours(part, link)
                entries.update(voices_of(part))
            case HostLink() if link := indexes.get(INSIDE):
                routes.update(link_routes(link))
                neighbours.update(link_neighbours(link))
                entries.update(link_entries(part))
            case Ground():
                routes.add(ground_route(part))
            case Homeward() if link := indexes.get(overlay_name(part.vni)):
                routes.add(homeward_route(part, link=link, via=next_hop(parse_address(part.vtep, field="vtep"))))
                entries.update(host_entries(part))
            case Disguise() | Alias() | Door():
                entries.update(host_entries(part))
            case _:
                pass  # devices, and what is the host's own
    return Facts(
        frozenset(addresses), frozenset(routes), frozenset(neighbours), frozenset(forwardings), frozenset(entries)
    )


def port_routes(port: Port, link: int) -> set[Route]:
    """The way to a workload from its node."""
    return {Route(to=host_prefix(address), link=link) for address in port.addresses}


def port_neighbours(port: Port, link: int) -> set[Neighbour]:
    """Who is behind the host end: nobody has to ask."""
    return {Neighbour(link=link, address=address, mac=port.mac) for address in port.addresses}
