"""The workload's side of an attachment: what its interface gets, and whether it still has it."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.adapters.netns.kernel_state import HOP_MAC, NODE_V4, NODE_V6, PORT_MAC
from weft.domain.addresses import BITS, Address
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.link import LOOPBACK, add_name, alter_link, read_link
from weft.kernel.netlink.neigh import Neighbour, put_neighbour, read_neighbours
from weft.kernel.netlink.route import (
    MAIN_TABLE,
    LinkAddress,
    Prefix,
    Route,
    Rule,
    drop_rule,
    local_route,
    put_address,
    put_route,
    put_rule,
    read_addresses,
    read_routes,
    read_rules,
)
from weft.kernel.netlink.socket import ROUTE, NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.ports.datapath import EndpointConfig, InterfaceAddress

_RULE_PRIORITY = 1000


@contextmanager
def inside(wiring: EndpointConfig, *, home: Namespace) -> Iterator[tuple[Namespace, NetlinkSocket]]:
    """The workload's namespace, and a socket in it that is opened from our own; `NotFound` when it is gone."""
    with (
        Namespace.open(Path(wiring.netns)) as namespace,
        NetlinkSocket(ROUTE, namespace=namespace, home=home) as socket,
    ):
        yield namespace, socket


def next_hop_of(wired: InterfaceAddress) -> Address:
    """Where the workload sends everything: its gateway, which its node answers for, else the node itself."""
    return wired.gateway or (NODE_V4 if wired.address.family == 4 else NODE_V6)


def addresses(wiring: EndpointConfig, link: int) -> list[LinkAddress]:
    """The addresses, without the kernel's route to the rest of the subnet: neighbours are reached through the node."""
    return [
        LinkAddress(link=link, prefix=Prefix(wired.address, wired.length), prefix_route=False)
        for wired in wiring.addresses
    ]


def routes(wiring: EndpointConfig, link: int) -> list[Route]:
    """For each family: the next hop is on the link, and everything else goes there. On a segment its subnet is, too.

    Beside another interface these are in a table of its own, and the main one has its subnet, where that is its alone.
    """
    found = []
    for wired in wiring.addresses:
        family, hop = wired.address.family, next_hop_of(wired)
        table = MAIN_TABLE if wiring.default_route else link
        found.append(Route(to=Prefix(hop, BITS[family]), link=link, table=table))
        found.append(Route(to=Prefix(Address(family, 0), 0), link=link, via=hop, table=table))
        rest = BITS[family] - wired.length
        subnet = Prefix(Address(family, wired.address.number >> rest << rest), wired.length)
        is_on_segment = bool(wiring.port.segment and rest)
        if is_on_segment:
            found.append(Route(to=subnet, link=link, table=table))
        if not wiring.default_route and not wiring.shares_subnets:
            found.append(
                Route(to=subnet, link=link) if is_on_segment else Route(to=subnet, link=link, via=hop, on_link=True)
            )
    return found


def rules(wiring: EndpointConfig, link: int) -> list[Rule]:
    """Beside another interface: what speaks from its addresses leaves through it, whoever else is in its subnets."""
    if wiring.default_route:
        return []
    return [
        Rule(
            family=wired.address.family,
            priority=_RULE_PRIORITY,
            table=link,
            source=Prefix(wired.address, BITS[wired.address.family]),
        )
        for wired in wiring.addresses
    ]


def local_routes(wiring: EndpointConfig, link: int) -> list[Route]:
    """What makes v6 addresses take packets at once, not when the kernel gets round to it."""
    return [local_route(each) for each in addresses(wiring, link) if each.prefix.address.family == 6]


def neighbours(wiring: EndpointConfig, link: int) -> list[Neighbour]:
    """The next hop's MAC is known: nobody is ever asked on the link."""
    mac = PORT_MAC if wiring.port.segment else HOP_MAC
    return [Neighbour(link=link, address=next_hop_of(wired), mac=mac) for wired in wiring.addresses]


def requests(wiring: EndpointConfig, link: int) -> Iterable[Request]:
    """All of it, in an order in which each request may stand on those before."""
    return (
        alter_link(LOOPBACK, up=True),
        alter_link(link, up=True),
        *(add_name(link, name) for name in (wiring.full_name,) if name),
        *map(put_address, addresses(wiring, link)),
        *map(put_route, local_routes(wiring, link)),
        *map(put_neighbour, neighbours(wiring, link)),
        *map(put_route, routes(wiring, link)),
        *map(put_rule, rules(wiring, link)),
    )


def configure_pod(wiring: EndpointConfig, link: int, *, namespace: Namespace, inside: NetlinkSocket) -> None:
    """Give the workload's end what it needs. Some runtimes make namespaces without v6: that is lifted for it."""
    wanted = [*requests(wiring, link)]
    if own := rules(wiring, link):
        # Of an interface that others took away, of which only these are left.
        sources = {each.source for each in own}
        stale = [each for each in read_rules(inside) if each.source in sources and each.priority == _RULE_PRIORITY]
        wanted = [*(drop_rule(each) for each in stale if each not in own), *wanted]
    try:
        inside.send_batch(wanted)
    except NetlinkError as refusal:
        if refusal.errno != errno.EACCES:
            raise
        namespace.write_sysctls({f"net/ipv6/conf/{name}/disable_ipv6": "0" for name in ("lo", wiring.interface)})
        inside.send_batch(wanted)


def deconfigure_pod(wiring: EndpointConfig, link: int) -> Iterable[Request]:
    """What does not go with the interface."""
    return map(drop_rule, rules(wiring, link))


def differences(wiring: EndpointConfig, netlink: NetlinkSocket) -> Iterator[str]:
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
    wanted: list[object] = [
        *addresses(wiring, link.index),
        *routes(wiring, link.index),
        *neighbours(wiring, link.index),
    ]
    if own_rules := rules(wiring, link.index):
        there.update(read_rules(netlink))
        wanted += own_rules
    yield from (f"{type(each).__name__.lower()} {each} is missing" for each in wanted if each not in there)
