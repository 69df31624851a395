"""Addresses, routes and policy routing rules, IPv4 and IPv6 (`linux/if_addr.h`, `rtnetlink.h`, `fib_rules.h`).

Each is one frozen value: what `read_` returns equals what `put_` wrote. `put_` and `drop_` are idempotent. A protocol
number marks routes and rules as ours; an address is ours when its device is.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

import msgspec

from weft.domain.addresses import BITS, Address
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import AF, AF_INET, AF_INET6, Request
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.uapi.netlink import NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE
from weft.kernel.uapi.rtnetlink import (
    FR_ACT_TO_TBL,
    FRA_DST,
    FRA_FWMARK,
    FRA_FWMASK,
    FRA_IIFNAME,
    FRA_PRIORITY,
    FRA_PROTOCOL,
    FRA_SRC,
    FRA_TABLE,
    IFA_ADDRESS,
    IFA_F_NODAD,
    IFA_F_NOPREFIXROUTE,
    IFA_FLAGS,
    IFA_LOCAL,
    RT_SCOPE_HOST,
    RT_SCOPE_LINK,
    RT_SCOPE_UNIVERSE,
    RT_TABLE_LOCAL,
    RT_TABLE_MAIN,
    RTA_DST,
    RTA_GATEWAY,
    RTA_METRICS,
    RTA_OIF,
    RTA_PREFSRC,
    RTA_PRIORITY,
    RTA_TABLE,
    RTA_VIA,
    RTAX_MTU,
    RTM_DELADDR,
    RTM_DELROUTE,
    RTM_DELRULE,
    RTM_GETADDR,
    RTM_GETROUTE,
    RTM_GETRULE,
    RTM_NEWADDR,
    RTM_NEWROUTE,
    RTM_NEWRULE,
    RTN_LOCAL,
    RTN_UNICAST,
    RTNH_F_ONLINK,
)

# The routing protocol id (`rtm_protocol`) of our routes and rules. No routing daemon uses it.
RTPROT_WEFT: Final = 87


_ADDRESS_HEADER = struct.Struct("=BBBBI")  # family, length, flags, scope, device

_ROUTE_HEADER = struct.Struct("=BBBBBBBBI")  # family, length, source length, tos, table, protocol, scope, kind, flags
# The kernel's default metric for IPv6 routes (IP6_RT_PRIO_USER); IPv4 has 0.
_V6_METRIC = 1024

_RULE_HEADER = struct.Struct("=BBBBBxxBI")  # family, length, source length, tos, table, action, flags

_GONE = frozenset({errno.ESRCH, errno.ENOENT, errno.ENODEV, errno.EADDRNOTAVAIL})
_EXISTS = frozenset({errno.EEXIST})


class Prefix(msgspec.Struct, frozen=True):
    """An address and a prefix length; host bits may be set."""

    address: Address
    length: int

    def __str__(self) -> str:
        return f"{self.address}/{self.length}"


class LinkAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a device. IPv6 ones skip duplicate address detection: IPAM guarantees that they are unique."""

    link: int
    prefix: Prefix
    # Whether the kernel adds the connected route for the prefix.
    prefix_route: bool = True

    def __str__(self) -> str:
        return f"{self.prefix} of link {self.link}"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A route with at most one next hop."""

    to: Prefix
    link: int = 0
    # The next hop; an IPv4 route may have an IPv6 one (RTA_VIA). Without it the destination is on the link.
    via: Address | None = None
    # The next hop is on the link even though no connected route covers it (RTNH_F_ONLINK).
    on_link: bool = False
    # Preferred source address (RTA_PREFSRC).
    source: Address | None = None
    table: int = RT_TABLE_MAIN
    # 0 means the kernel's default.
    metric: int = 0
    mtu: int = 0
    kind: int = RTN_UNICAST

    def __str__(self) -> str:
        via = "" if self.via is None else f" via {self.via}"
        return f"to {self.to}{via} on link {self.link}, table {self.table}"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A policy routing rule: packets that match all selectors use `table`. The mark is compared under `mask`."""

    family: int
    priority: int
    table: int
    input_link: str = ""
    mark: int = 0
    mask: int = 0
    source: Prefix | None = None
    to: Prefix | None = None

    def __str__(self) -> str:
        return f"{self.priority} for table {self.table}, IPv{self.family}"


def local_route(address: LinkAddress) -> Route:
    """Return the local route that makes a new IPv6 address receive packets at once.

    The kernel adds it too, but in a worker after RTM_NEWADDR has returned; packets until then are dropped.
    """
    whole = Prefix(address.prefix.address, BITS[address.prefix.address.family])
    return Route(to=whole, link=address.link, table=RT_TABLE_LOCAL, kind=RTN_LOCAL)


def put_address(address: LinkAddress) -> Request:
    return Request(RTM_NEWADDR, NLM_F_CREATE | NLM_F_REPLACE, _encode_address(address), "add address", address)


def drop_address(address: LinkAddress) -> Request:
    return Request(RTM_DELADDR, 0, _encode_address(address), "delete address", address, _GONE)


def put_route(route: Route) -> Request:
    """Add a route; replaces one with the same destination, table and metric."""
    return Request(RTM_NEWROUTE, NLM_F_CREATE | NLM_F_REPLACE, _encode_route(route), "add route", route)


def drop_route(route: Route) -> Request:
    """Delete exactly this route; one of another protocol or next hop to the same destination stays."""
    return Request(RTM_DELROUTE, 0, _encode_route(route), "delete route", route, _GONE)


def put_rule(rule: Rule) -> Request:
    return Request(RTM_NEWRULE, NLM_F_CREATE | NLM_F_EXCL, _encode_rule(rule), "add rule", rule, _EXISTS)


def drop_rule(rule: Rule) -> Request:
    return Request(RTM_DELRULE, 0, _encode_rule(rule), "delete rule", rule, _GONE)


def read_addresses(netlink: NetlinkSocket, *, link: int) -> list[LinkAddress]:
    """Read all addresses of a device, also those that the kernel generated; empty when there is no such device."""
    payload = _ADDRESS_HEADER.pack(codec.AF_UNSPEC, 0, 0, 0, link)
    return [
        parse_address(answer) for answer in netlink.dump(Request(RTM_GETADDR, 0, payload, "read", "addresses", _GONE))
    ]


def read_routes(netlink: NetlinkSocket, *, protocol: int = RTPROT_WEFT) -> list[Route]:
    """Read the routes of a protocol (0: all) in both families and all tables."""
    return [
        parse_route(answer)
        for family in (AF_INET, AF_INET6)
        for answer in netlink.dump(
            Request(RTM_GETROUTE, 0, _ROUTE_HEADER.pack(family, 0, 0, 0, 0, protocol, 0, 0, 0), "read", "routes")
        )
    ]


def read_rules(netlink: NetlinkSocket) -> list[Rule]:
    """Read our rules, of both families."""
    rules = (
        parse_rule(answer)
        for family in (AF_INET, AF_INET6)
        for answer in netlink.dump(
            Request(RTM_GETRULE, 0, _RULE_HEADER.pack(family, 0, 0, 0, 0, 0, 0), "read", "rules")
        )
    )
    return [rule for rule in rules if rule is not None]


def parse_address(payload: bytes) -> LinkAddress:
    _, length, _, _, link = codec.unpack_header(_ADDRESS_HEADER, payload)
    found = codec.attributes(payload, _ADDRESS_HEADER.size)
    own = found.get(IFA_LOCAL) or found.get(IFA_ADDRESS, b"")
    flags = codec.to_int(found.get(IFA_FLAGS))
    return LinkAddress(
        link=link, prefix=Prefix(codec.to_address(own), length), prefix_route=not flags & IFA_F_NOPREFIXROUTE
    )


def parse_route(payload: bytes) -> Route:
    number, length, _, _, table, _, _, kind, flags = codec.unpack_header(_ROUTE_HEADER, payload)
    found = codec.attributes(payload, _ROUTE_HEADER.size)
    family = codec.to_family(number)
    metric = codec.to_int(found.get(RTA_PRIORITY))
    return Route(
        to=Prefix(codec.to_address(found[RTA_DST]) if RTA_DST in found else Address(family, 0), length),
        # The kernel reports `lo` as the device of IPv6 blackhole and unreachable routes.
        link=codec.to_int(found.get(RTA_OIF)) if kind in (RTN_UNICAST, RTN_LOCAL) else 0,
        via=_parse_next_hop(found),
        on_link=bool(flags & RTNH_F_ONLINK),
        source=codec.to_address(found[RTA_PREFSRC]) if RTA_PREFSRC in found else None,
        table=codec.to_int(found.get(RTA_TABLE)) or table,
        metric=0 if family == 6 and metric == _V6_METRIC else metric,
        mtu=codec.to_int(codec.attributes(found.get(RTA_METRICS, b"")).get(RTAX_MTU)),
        kind=kind,
    )


def parse_rule(payload: bytes) -> Rule | None:
    """Decode a rule; None when it is not ours."""
    number, length, source_length, _, table, _, _ = codec.unpack_header(_RULE_HEADER, payload)
    found = codec.attributes(payload, _RULE_HEADER.size)
    if codec.to_int(found.get(FRA_PROTOCOL)) != RTPROT_WEFT:
        return None
    return Rule(
        family=codec.to_family(number),
        priority=codec.to_int(found.get(FRA_PRIORITY)),
        table=codec.to_int(found.get(FRA_TABLE)) or table,
        input_link=codec.to_text(found.get(FRA_IIFNAME)),
        mark=codec.to_int(found.get(FRA_FWMARK)),
        mask=codec.to_int(found.get(FRA_FWMASK)),
        source=Prefix(codec.to_address(found[FRA_SRC]), source_length) if FRA_SRC in found else None,
        to=Prefix(codec.to_address(found[FRA_DST]), length) if FRA_DST in found else None,
    )


def _parse_next_hop(found: dict[int, bytes]) -> Address | None:
    if RTA_GATEWAY in found:
        return codec.to_address(found[RTA_GATEWAY])
    return codec.to_address(found[RTA_VIA][2:]) if RTA_VIA in found else None


def _encode_address(address: LinkAddress) -> bytes:
    own = address.prefix.address
    packed = codec.pack_address(own)
    flags = (IFA_F_NODAD if own.family == 6 else 0) | (0 if address.prefix_route else IFA_F_NOPREFIXROUTE)
    return (
        _ADDRESS_HEADER.pack(AF[own.family], address.prefix.length, 0, RT_SCOPE_UNIVERSE, address.link)
        + codec.attribute(IFA_LOCAL, packed)
        + codec.attribute(IFA_ADDRESS, packed)
        + codec.u32(IFA_FLAGS, flags)
    )


def _encode_route(route: Route) -> bytes:
    family = route.to.address.family
    if route.kind == RTN_LOCAL:
        scope = RT_SCOPE_HOST
    else:
        scope = RT_SCOPE_LINK if route.kind == RTN_UNICAST and route.via is None else RT_SCOPE_UNIVERSE
    flags = RTNH_F_ONLINK if route.on_link else 0
    # rtm_table is one byte; RTA_TABLE takes any number.
    return (
        _ROUTE_HEADER.pack(AF[family], route.to.length, 0, 0, 0, RTPROT_WEFT, scope, route.kind, flags)
        + (codec.address(RTA_DST, route.to.address) if route.to.length else b"")
        + codec.u32(RTA_TABLE, route.table)
        + (codec.u32(RTA_OIF, route.link) if route.link else b"")
        + (b"" if route.via is None else _next_hop(route.via, family))
        + (b"" if route.source is None else codec.address(RTA_PREFSRC, route.source))
        + (codec.u32(RTA_PRIORITY, route.metric) if route.metric else b"")
        + (codec.nest(RTA_METRICS, codec.u32(RTAX_MTU, route.mtu)) if route.mtu else b"")
    )


def _next_hop(via: Address, family: int) -> bytes:
    if via.family == family:
        return codec.address(RTA_GATEWAY, via)
    return codec.attribute(RTA_VIA, struct.pack("=H", AF[via.family]) + codec.pack_address(via))


def _encode_rule(rule: Rule) -> bytes:
    return (
        _RULE_HEADER.pack(
            AF[rule.family],
            0 if rule.to is None else rule.to.length,
            0 if rule.source is None else rule.source.length,
            0,
            0,
            FR_ACT_TO_TBL,
            0,
        )
        + codec.u32(FRA_PRIORITY, rule.priority)
        + codec.u32(FRA_TABLE, rule.table)
        + codec.u8(FRA_PROTOCOL, RTPROT_WEFT)
        + (codec.text(FRA_IIFNAME, rule.input_link) if rule.input_link else b"")
        + (codec.u32(FRA_FWMARK, rule.mark) + codec.u32(FRA_FWMASK, rule.mask) if rule.mask else b"")
        + (b"" if rule.source is None else codec.address(FRA_SRC, rule.source.address))
        + (b"" if rule.to is None else codec.address(FRA_DST, rule.to.address))
    )
