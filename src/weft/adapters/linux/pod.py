"""The workload's side of an attachment: what its interface gets, and whether it still has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.adapters.linux.facts import NODE_V4, NODE_V6, PORT_MAC
from weft.adapters.linux.links import LOOPBACK, alter_link, read_link
from weft.adapters.linux.neighbours import Neighbour, put_neighbour, read_neighbours
from weft.adapters.linux.netlink import NetlinkSocket
from weft.adapters.linux.routes import (
    LinkAddress,
    Prefix,
    Route,
    local_route,
    put_address,
    put_route,
    read_addresses,
    read_routes,
)
from weft.adapters.linux.wire import Request
from weft.domain.addresses import BITS, Address
from weft.ports.datapath import WiredAddress, Wiring


def next_hop_of(wired: WiredAddress) -> Address:
    """Where the workload sends everything: its gateway, which its node answers for, else the node itself."""
    return wired.gateway or (NODE_V4 if wired.address.family == 4 else NODE_V6)


def addresses(wiring: Wiring, link: int) -> list[LinkAddress]:
    """The addresses, without the kernel's route to the rest of the subnet: neighbours are reached through the node."""
    return [
        LinkAddress(link=link, prefix=Prefix(wired.address, wired.length), prefix_route=False)
        for wired in wiring.addresses
    ]


def routes(wiring: Wiring, link: int) -> list[Route]:
    """For each family: the next hop is on the link; everything else goes there, or the rest of the subnet."""
    found = []
    for wired in wiring.addresses:
        family, hop = wired.address.family, next_hop_of(wired)
        length = 0 if wiring.way_out else wired.length
        rest = BITS[family] - length
        found.append(Route(to=Prefix(hop, BITS[family]), link=link))
        found.append(
            Route(to=Prefix(Address(family, wired.address.number >> rest << rest), length), link=link, via=hop)
        )
    return found


def local_routes(wiring: Wiring, link: int) -> list[Route]:
    """What makes v6 addresses take packets at once, not when the kernel gets round to it."""
    return [local_route(each) for each in addresses(wiring, link) if each.prefix.address.family == 6]


def neighbours(wiring: Wiring, link: int) -> list[Neighbour]:
    """The next hop's MAC is known: nobody is ever asked on the link."""
    return [Neighbour(link=link, address=next_hop_of(wired), mac=PORT_MAC) for wired in wiring.addresses]


def requests(wiring: Wiring, link: int) -> Iterable[Request]:
    """All of it, in an order in which each request may stand on those before."""
    return (
        alter_link(LOOPBACK, up=True),
        alter_link(link, up=True),
        *map(put_address, addresses(wiring, link)),
        *map(put_route, local_routes(wiring, link)),
        *map(put_neighbour, neighbours(wiring, link)),
        *map(put_route, routes(wiring, link)),
    )


def differences(wiring: Wiring, netlink: NetlinkSocket) -> Iterator[str]:
    """What the namespace has not, or has otherwise, in words. Additions by others are none of our business."""
    link = read_link(netlink, wiring.interface)
    if link is None:
        yield f"interface {wiring.interface} is missing"
        return
    if link.mac != wiring.port.mac:
        yield f"interface {wiring.interface} has MAC {link.mac}, not {wiring.port.mac}"
    if not link.up:
        yield f"interface {wiring.interface} is down"
    there: set[object] = {
        *read_addresses(netlink, link=link.index),
        *read_routes(netlink),
        *read_neighbours(netlink),
    }
    wanted = (*addresses(wiring, link.index), *routes(wiring, link.index), *neighbours(wiring, link.index))
    yield from (f"{type(each).__name__.lower()} {each} is missing" for each in wanted if each not in there)
