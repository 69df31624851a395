"""Addresses, routes and rules of a namespace, v4 and v6 (`include/uapi/linux/if_addr.h`, `rtnetlink.h`, `fib_rules.h`).

Each is one frozen value, written and read back alike: what `read_` gives equals what was put. `put_` and `drop_` name
an end state. Routes and rules bear a protocol number as the mark of ours; an address is ours when its device is.
"""

from __future__ import annotations

import errno
import struct
from typing import Final

import msgspec

from weft.domain.addresses import BITS, Address
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import AF, AF_INET, AF_INET6, CREATE, EXCLUSIVE, REPLACE, Request
from weft.kernel.netlink.socket import NetlinkSocket

# Who made a route or a rule: in the kernel's words, its *protocol*. No routing daemon uses this number.
OURS: Final = 87

MAIN_TABLE: Final = 254
LOCAL_TABLE: Final = 255
UNICAST, LOCAL, BLACKHOLE, UNREACHABLE, PROHIBIT = 1, 2, 6, 7, 8

_NEWADDR, _DELADDR, _GETADDR = 20, 21, 22
_NEWROUTE, _DELROUTE, _GETROUTE = 24, 25, 26
_NEWRULE, _DELRULE, _GETRULE = 32, 33, 34

_ADDRESS_HEADER = struct.Struct("=BBBBI")  # family, length, flags, scope, device
_PEER_ADDRESS, _OWN_ADDRESS, _ADDRESS_FLAGS = 1, 2, 8
_NO_DETECTION, _NO_PREFIX_ROUTE = 0x2, 0x200

_ROUTE_HEADER = struct.Struct("=BBBBBBBBI")  # family, length, source length, tos, table, protocol, scope, kind, flags
_TO, _DEVICE, _GATEWAY, _METRIC, _SOURCE, _METRICS, _TABLE, _VIA = 1, 4, 5, 6, 7, 8, 15, 18
_METRICS_MTU = 2
_ON_LINK = 4
_UNIVERSE, _ON_THE_LINK, _ON_THE_HOST = 0, 253, 254
_V6_METRIC = 1024

_RULE_HEADER = struct.Struct("=BBBBBxxBI")  # family, length, source length, tos, table, action, flags
_RULE_TO, _RULE_SOURCE, _RULE_INPUT, _RULE_PRIORITY, _RULE_MARK = 1, 2, 3, 6, 10
_RULE_TABLE, _RULE_MASK, _RULE_PROTOCOL = 15, 16, 21
_LOOK_UP = 1

_GONE = frozenset({errno.ESRCH, errno.ENOENT, errno.ENODEV, errno.EADDRNOTAVAIL})
_STANDS = frozenset({errno.EEXIST})


class Prefix(msgspec.Struct, frozen=True):
    """An address and how many of its bits count."""

    address: Address
    length: int

    def __str__(self) -> str:
        return f"{self.address}/{self.length}"


class LinkAddress(msgspec.Struct, frozen=True, kw_only=True):
    """An address of a device. We know whose it is, so the kernel does not ask on the link before a v6 one serves."""

    link: int
    prefix: Prefix
    # Whether the kernel adds a route to the rest of the prefix.
    prefix_route: bool = True

    def __str__(self) -> str:
        return f"{self.prefix} of link {self.link}"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A route with at most one next hop."""

    to: Prefix
    link: int = 0
    # The next hop (of a v4 route also a v6 one). Without it the destination itself is on the link.
    via: Address | None = None
    # The next hop is on the link, though no other route says so.
    on_link: bool = False
    # Which of our own addresses to speak from.
    source: Address | None = None
    table: int = MAIN_TABLE
    # 0 is the kernel's default.
    metric: int = 0
    mtu: int = 0
    kind: int = UNICAST

    def __str__(self) -> str:
        via = "" if self.via is None else f" via {self.via}"
        return f"to {self.to}{via} on link {self.link}, table {self.table}"


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Which table to look into for packets that fit all that is given. The mark counts only under a mask."""

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
    """What makes a new v6 address take packets at once.

    The kernel adds such a route by itself, but later, when a worker gets round to it: packets may be lost until then.
    """
    whole = Prefix(address.prefix.address, BITS[address.prefix.address.family])
    return Route(to=whole, link=address.link, table=LOCAL_TABLE, kind=LOCAL)


def put_address(address: LinkAddress) -> Request:
    return Request(_NEWADDR, CREATE | REPLACE, _encode_address(address), "add address", address)


def drop_address(address: LinkAddress) -> Request:
    return Request(_DELADDR, 0, _encode_address(address), "delete address", address, _GONE)


def put_route(route: Route) -> Request:
    """The route, in place of any other to the same destination with the same table and metric."""
    return Request(_NEWROUTE, CREATE | REPLACE, _encode_route(route), "add route", route)


def drop_route(route: Route) -> Request:
    """No such route. Another to the same destination, not of ours or with another next hop, is left alone."""
    return Request(_DELROUTE, 0, _encode_route(route), "delete route", route, _GONE)


def put_rule(rule: Rule) -> Request:
    return Request(_NEWRULE, CREATE | EXCLUSIVE, _encode_rule(rule), "add rule", rule, _STANDS)


def drop_rule(rule: Rule) -> Request:
    return Request(_DELRULE, 0, _encode_rule(rule), "delete rule", rule, _GONE)


def read_addresses(netlink: NetlinkSocket, *, link: int) -> list[LinkAddress]:
    """All addresses of a device, also those which the kernel gave it by itself; none when there is no such device."""
    payload = _ADDRESS_HEADER.pack(codec.AF_UNSPEC, 0, 0, 0, link)
    return [parse_address(answer) for answer in netlink.dump(Request(_GETADDR, 0, payload, "read", "addresses", _GONE))]


def read_routes(netlink: NetlinkSocket, *, protocol: int = OURS) -> list[Route]:
    """The routes of both families and all tables that bear the protocol number (0: all)."""
    return [
        parse_route(answer)
        for family in (AF_INET, AF_INET6)
        for answer in netlink.dump(
            Request(_GETROUTE, 0, _ROUTE_HEADER.pack(family, 0, 0, 0, 0, protocol, 0, 0, 0), "read", "routes")
        )
    ]


def read_rules(netlink: NetlinkSocket) -> list[Rule]:
    """Our rules, of both families."""
    rules = (
        parse_rule(answer)
        for family in (AF_INET, AF_INET6)
        for answer in netlink.dump(Request(_GETRULE, 0, _RULE_HEADER.pack(family, 0, 0, 0, 0, 0, 0), "read", "rules"))
    )
    return [rule for rule in rules if rule is not None]


def parse_address(payload: bytes) -> LinkAddress:
    _, length, _, _, link = codec.unpack_header(_ADDRESS_HEADER, payload)
    found = codec.attributes(payload, _ADDRESS_HEADER.size)
    own = found.get(_OWN_ADDRESS) or found.get(_PEER_ADDRESS, b"")
    flags = codec.to_number(found.get(_ADDRESS_FLAGS))
    return LinkAddress(
        link=link, prefix=Prefix(codec.to_address(own), length), prefix_route=not flags & _NO_PREFIX_ROUTE
    )


def parse_route(payload: bytes) -> Route:
    number, length, _, _, table, _, _, kind, flags = codec.unpack_header(_ROUTE_HEADER, payload)
    found = codec.attributes(payload, _ROUTE_HEADER.size)
    family = codec.to_family(number)
    metric = codec.to_number(found.get(_METRIC))
    return Route(
        to=Prefix(codec.to_address(found[_TO]) if _TO in found else Address(family, 0), length),
        # In v6 a route to nowhere leads to the loopback device.
        link=codec.to_number(found.get(_DEVICE)) if kind in (UNICAST, LOCAL) else 0,
        via=_parse_next_hop(found),
        on_link=bool(flags & _ON_LINK),
        source=codec.to_address(found[_SOURCE]) if _SOURCE in found else None,
        table=codec.to_number(found.get(_TABLE)) or table,
        metric=0 if family == 6 and metric == _V6_METRIC else metric,
        mtu=codec.to_number(codec.attributes(found.get(_METRICS, b"")).get(_METRICS_MTU)),
        kind=kind,
    )


def parse_rule(payload: bytes) -> Rule | None:
    """A rule, or nothing when it is not one of ours."""
    number, length, source_length, _, table, _, _ = codec.unpack_header(_RULE_HEADER, payload)
    found = codec.attributes(payload, _RULE_HEADER.size)
    if codec.to_number(found.get(_RULE_PROTOCOL)) != OURS:
        return None
    return Rule(
        family=codec.to_family(number),
        priority=codec.to_number(found.get(_RULE_PRIORITY)),
        table=codec.to_number(found.get(_RULE_TABLE)) or table,
        input_link=codec.to_text(found.get(_RULE_INPUT)),
        mark=codec.to_number(found.get(_RULE_MARK)),
        mask=codec.to_number(found.get(_RULE_MASK)),
        source=Prefix(codec.to_address(found[_RULE_SOURCE]), source_length) if _RULE_SOURCE in found else None,
        to=Prefix(codec.to_address(found[_RULE_TO]), length) if _RULE_TO in found else None,
    )


def _parse_next_hop(found: dict[int, bytes]) -> Address | None:
    if _GATEWAY in found:
        return codec.to_address(found[_GATEWAY])
    return codec.to_address(found[_VIA][2:]) if _VIA in found else None


def _encode_address(address: LinkAddress) -> bytes:
    own = address.prefix.address
    packed = codec.pack_address(own)
    flags = (_NO_DETECTION if own.family == 6 else 0) | (0 if address.prefix_route else _NO_PREFIX_ROUTE)
    return (
        _ADDRESS_HEADER.pack(AF[own.family], address.prefix.length, 0, _UNIVERSE, address.link)
        + codec.attribute(_OWN_ADDRESS, packed)
        + codec.attribute(_PEER_ADDRESS, packed)
        + codec.u32(_ADDRESS_FLAGS, flags)
    )


def _encode_route(route: Route) -> bytes:
    family = route.to.address.family
    if route.kind == LOCAL:
        scope = _ON_THE_HOST
    else:
        scope = _ON_THE_LINK if route.kind == UNICAST and route.via is None else _UNIVERSE
    flags = _ON_LINK if route.on_link else 0
    # The header has room for small table numbers only; the attribute takes any.
    return (
        _ROUTE_HEADER.pack(AF[family], route.to.length, 0, 0, 0, OURS, scope, route.kind, flags)
        + (codec.address(_TO, route.to.address) if route.to.length else b"")
        + codec.u32(_TABLE, route.table)
        + (codec.u32(_DEVICE, route.link) if route.link else b"")
        + (b"" if route.via is None else _next_hop(route.via, family))
        + (b"" if route.source is None else codec.address(_SOURCE, route.source))
        + (codec.u32(_METRIC, route.metric) if route.metric else b"")
        + (codec.nest(_METRICS, codec.u32(_METRICS_MTU, route.mtu)) if route.mtu else b"")
    )


def _next_hop(via: Address, family: int) -> bytes:
    if via.family == family:
        return codec.address(_GATEWAY, via)
    return codec.attribute(_VIA, struct.pack("=H", AF[via.family]) + codec.pack_address(via))


def _encode_rule(rule: Rule) -> bytes:
    return (
        _RULE_HEADER.pack(
            AF[rule.family],
            0 if rule.to is None else rule.to.length,
            0 if rule.source is None else rule.source.length,
            0,
            0,
            _LOOK_UP,
            0,
        )
        + codec.u32(_RULE_PRIORITY, rule.priority)
        + codec.u32(_RULE_TABLE, rule.table)
        + codec.u8(_RULE_PROTOCOL, OURS)
        + (codec.text(_RULE_INPUT, rule.input_link) if rule.input_link else b"")
        + (codec.u32(_RULE_MARK, rule.mark) + codec.u32(_RULE_MASK, rule.mask) if rule.mask else b"")
        + (b"" if rule.source is None else codec.address(_RULE_SOURCE, rule.source.address))
        + (b"" if rule.to is None else codec.address(_RULE_TO, rule.to.address))
    )
