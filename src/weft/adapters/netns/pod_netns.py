"""The pod's side of an endpoint: configuration of the interface in the pod netns, and its check."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from weft.adapters.netns.devices import HOP_MAC, NODE_V4, NODE_V6, PORT_MAC
from weft.domain.addresses import BITS, Address
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.link import LOOPBACK_IFINDEX, add_altname, change_link, read_link
from weft.kernel.netlink.neigh import Neighbour, put_neighbour, read_neighbours
from weft.kernel.netlink.route import (
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
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.kernel.uapi.rtnetlink import RT_TABLE_MAIN
from weft.ports.datapath import EndpointConfig, InterfaceAddress

# Before the rule for the main table (32766).
_RULE_PRIORITY = 1000


@contextmanager
def open_netns(config: EndpointConfig, *, home: Namespace) -> Iterator[tuple[Namespace, NetlinkSocket]]:
    """Open the pod netns and a netlink socket in it; `NotFound` if it does not exist. `home` is the caller's netns."""
    with (
        Namespace.open(Path(config.netns)) as namespace,
        NetlinkSocket(NETLINK_ROUTE, namespace=namespace, home=home) as socket,
    ):
        yield namespace, socket


def next_hop_of(assigned: InterfaceAddress) -> Address:
    """Return the next hop of the pod's default route: its gateway, or the node's link-local address."""
    return assigned.gateway or (NODE_V4 if assigned.address.family == 4 else NODE_V6)


def addresses(config: EndpointConfig, link: int) -> list[LinkAddress]:
    """Return the addresses of the interface."""
    # Without the kernel's prefix route: in routing mode also the pod's own subnet is reached through the node.
    return [
        LinkAddress(link=link, prefix=Prefix(assigned.address, assigned.length), prefix_route=False)
        for assigned in config.addresses
    ]


def routes(config: EndpointConfig, link: int) -> list[Route]:
    """Return the routes: next hop, default route, and on a segment the subnet.

    An interface without the default route has these in a table of its own, and the main table has only its subnet,
    unless another interface shares it.
    """
    found = []
    for assigned in config.addresses:
        family, hop = assigned.address.family, next_hop_of(assigned)
        # The interface index is the table id: unique in the netns.
        table = RT_TABLE_MAIN if config.default_route else link
        found.append(Route(to=Prefix(hop, BITS[family]), link=link, table=table))
        found.append(Route(to=Prefix(Address(family, 0), 0), link=link, via=hop, table=table))
        host_bits = BITS[family] - assigned.length
        subnet = Prefix(Address(family, assigned.address.number >> host_bits << host_bits), assigned.length)
        is_on_segment = bool(config.port.segment and host_bits)
        if is_on_segment:
            found.append(Route(to=subnet, link=link, table=table))
        if not config.default_route and not config.shares_subnets:
            found.append(
                Route(to=subnet, link=link) if is_on_segment else Route(to=subnet, link=link, via=hop, on_link=True)
            )
    return found


def rules(config: EndpointConfig, link: int) -> list[Rule]:
    """Return the rules of an interface without the default route: packets from its addresses leave through it."""
    if config.default_route:
        return []
    return [
        Rule(
            family=assigned.address.family,
            priority=_RULE_PRIORITY,
            table=link,
            source=Prefix(assigned.address, BITS[assigned.address.family]),
        )
        for assigned in config.addresses
    ]


def local_routes(config: EndpointConfig, link: int) -> list[Route]:
    """Return the local routes of v6 addresses."""
    # The kernel adds them from a work queue; until then it would drop packets to the address.
    return [local_route(each) for each in addresses(config, link) if each.prefix.address.family == 6]


def neighbours(config: EndpointConfig, link: int) -> list[Neighbour]:
    """Return the permanent neighbour entries of the next hops: the pod never sends ARP or ND for them."""
    mac = PORT_MAC if config.port.segment else HOP_MAC
    return [Neighbour(link=link, address=next_hop_of(assigned), mac=mac) for assigned in config.addresses]


def requests(config: EndpointConfig, link: int) -> Iterable[Request]:
    """Return all requests, each after those it depends on."""
    return (
        change_link(LOOPBACK_IFINDEX, up=True),
        change_link(link, up=True),
        *(add_altname(link, name) for name in (config.alt_ifname,) if name),
        *map(put_address, addresses(config, link)),
        *map(put_route, local_routes(config, link)),
        *map(put_neighbour, neighbours(config, link)),
        *map(put_route, routes(config, link)),
        *map(put_rule, rules(config, link)),
    )


def configure_pod(config: EndpointConfig, link: int, *, namespace: Namespace, pod_netlink: NetlinkSocket) -> None:
    """Configure the pod's end."""
    wanted = [*requests(config, link)]
    if own := rules(config, link):
        # Rules outlive their interface. Somebody may have deleted a former one with the same addresses.
        sources = {each.source for each in own}
        stale = [each for each in read_rules(pod_netlink) if each.source in sources and each.priority == _RULE_PRIORITY]
        wanted = [*(drop_rule(each) for each in stale if each not in own), *wanted]
    try:
        pod_netlink.send_batch(wanted)
    except NetlinkError as error:
        if error.errno != errno.EACCES:
            raise
        # Some runtimes create namespaces with IPv6 disabled.
        namespace.write_sysctls({f"net/ipv6/conf/{name}/disable_ipv6": "0" for name in ("lo", config.interface)})
        pod_netlink.send_batch(wanted)


def deconfigure_pod(config: EndpointConfig, link: int) -> Iterable[Request]:
    """Return requests that delete what the kernel does not delete with the interface."""
    return map(drop_rule, rules(config, link))


def differences(config: EndpointConfig, netlink: NetlinkSocket) -> Iterator[str]:
    """Describe what is missing or different in the pod netns. Additions by others are ignored."""
    link = read_link(netlink, config.interface)
    if link is None:
        yield f"interface {config.interface} is missing"
        return
    if link.mac != config.port.mac:
        yield f"interface {config.interface} has MAC {link.mac}, not {config.port.mac}"
    if not link.up:
        yield f"interface {config.interface} is down"
    actual: set[object] = {
        *read_addresses(netlink, link=link.index),
        *read_routes(netlink),
        *read_neighbours(netlink),
    }
    wanted: list[object] = [
        *addresses(config, link.index),
        *routes(config, link.index),
        *neighbours(config, link.index),
    ]
    if own_rules := rules(config, link.index):
        actual.update(read_rules(netlink))
        wanted += own_rules
    yield from (f"{type(each).__name__.lower()} {each} is missing" for each in wanted if each not in actual)
