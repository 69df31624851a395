"""Connections that the kernel remembers: found by who talks to whom, and forgotten (`nfnetlink_conntrack.h`).

A connection has an original and a reply direction. Where addresses are translated they differ by more than being
reversed: who asks is the original source, who answers in the end is the reply source.

Recent kernels forget by pattern, in a third of a millisecond. We ask that for IPv4 only: given an IPv6 address, the
kernel picks the connections of all others (seen on 6.18). There, and where the kernel knows no patterns, we read and
pick ourselves, which takes 10 to 30 ms with the usual quarter of a million buckets.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Sequence, Set

import msgspec

from weft.domain.addresses import Address
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import AF, Request
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket

_SUBSYSTEM = 1
_GET, _DELETE = (_SUBSYSTEM << 8 | number for number in (1, 2))
_HEADER = struct.Struct(">BBH")  # family, version, nothing
_ORIGINAL, _REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_ADDRESSES, _PROTOCOL = 1, 2
_SOURCE, _DESTINATION = {4: 1, 6: 3}, {4: 2, 6: 4}
_NUMBER, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 3
_BY_SOURCE, _BY_DESTINATION, _BY_PROTOCOL, _BY_SOURCE_PORT, _BY_DESTINATION_PORT = 0x01, 0x02, 0x08, 0x10, 0x20

_GONE = frozenset({errno.ENOENT})
# How kernels answer that do not forget by pattern.
_CANNOT = frozenset({errno.EOPNOTSUPP, errno.EINVAL})
# So many addresses are forgotten one by one sooner than by reading all connections.
_FEW = 16


class Direction(msgspec.Struct, frozen=True, kw_only=True):
    """One direction of a connection. In a pattern, what is absent or 0 fits everything."""

    source: Address | None = None
    destination: Address | None = None
    protocol: int = 0
    source_port: int = 0
    destination_port: int = 0

    def fits(self, found: Direction) -> bool:
        """Whether what was found has all that this pattern asks for."""
        return (
            self.source in (None, found.source)
            and self.destination in (None, found.destination)
            and self.protocol in (0, found.protocol)
            and self.source_port in (0, found.source_port)
            and self.destination_port in (0, found.destination_port)
        )


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """Which connections are meant: those that fit in both directions."""

    original: Direction = Direction()
    reply: Direction = Direction()

    def fits(self, connection: Connection) -> bool:
        return self.original.fits(connection.original) and self.reply.fits(connection.reply)


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A connection as the kernel remembers it, and the attributes that name exactly this one."""

    original: Direction
    reply: Direction
    handle: bytes


def forget_endpoints(netlink: NetlinkSocket, addresses: Set[Address]) -> None:
    """Forget all connections in which any of the addresses asks or, in the end, answers."""
    for family in (4, 6):
        ends = {address for address in addresses if address.family == family}
        if family == 4 and len(ends) <= _FEW:
            there = [Direction(source=end) for end in ends]
            patterns = [pattern for each in there for pattern in (Pattern(original=each), Pattern(reply=each))]
            forget_connections(netlink, patterns, family=family)
        elif ends:
            found = read_connections(netlink, family=family)
            forget_each(
                netlink, (each for each in found if {each.original.source, each.reply.source} & ends), family=family
            )


def forget_connections(netlink: NetlinkSocket, patterns: Sequence[Pattern], *, family: int) -> None:
    """Forget the connections that fit any of the patterns: the next packet of each is judged like a first one."""
    header = _HEADER.pack(AF[family], 0, 0)
    if family == 4:
        try:
            netlink.send_batch(
                [Request(_DELETE, 0, header + encode_filter(item), "forget connections", item) for item in patterns]
            )
        except NetlinkError as refusal:
            if refusal.errno not in _CANNOT:
                raise
        else:
            return
    found = read_connections(netlink, family=family)
    forget_each(netlink, (each for each in found if any(pattern.fits(each) for pattern in patterns)), family=family)


def forget_each(netlink: NetlinkSocket, connections: Iterable[Connection], *, family: int) -> None:
    """Forget these very connections; those that have ended meanwhile are fine."""
    header = _HEADER.pack(AF[family], 0, 0)
    netlink.send_batch(
        [Request(_DELETE, 0, header + each.handle, "forget connection", each.original, _GONE) for each in connections]
    )


def read_connections(netlink: NetlinkSocket, *, family: int) -> list[Connection]:
    """All connections of the namespace."""
    request = Request(_GET, 0, _HEADER.pack(AF[family], 0, 0), "read", "connections")
    return [parse_connection(answer) for answer in netlink.dump(request)]


def parse_connection(payload: bytes) -> Connection:
    """A connection out of the kernel's description."""
    number, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    family = codec.to_family(number)
    original = found.get(_ORIGINAL, b"")
    return Connection(
        original=_parse_direction(original, family),
        reply=_parse_direction(found.get(_REPLY, b""), family),
        handle=codec.nest(_ORIGINAL, original)
        + b"".join(codec.attribute(kind, found[kind]) for kind in (_ID, _ZONE) if kind in found),
    )


def encode_filter(pattern: Pattern) -> bytes:
    """The pattern, and which of its parts are meant."""
    flags = b""
    directions = b""
    for kind, direction in ((_ORIGINAL, pattern.original), (_REPLY, pattern.reply)):
        addresses, by_address = _encode_addresses(direction)
        protocol, by_protocol = _encode_protocol(direction)
        directions += codec.nest(kind, codec.nest(_ADDRESSES, addresses), codec.nest(_PROTOCOL, protocol))
        flags += codec.u32(kind, by_address | by_protocol)
    return directions + codec.nest(_FILTER, flags)


def _encode_addresses(direction: Direction) -> tuple[bytes, int]:
    data, flags = b"", 0
    if direction.source is not None:
        data += codec.address(_SOURCE[direction.source.family], direction.source)
        flags |= _BY_SOURCE
    if direction.destination is not None:
        data += codec.address(_DESTINATION[direction.destination.family], direction.destination)
        flags |= _BY_DESTINATION
    return data, flags


def _encode_protocol(direction: Direction) -> tuple[bytes, int]:
    data, flags = b"", 0
    if direction.protocol:
        data += codec.u8(_NUMBER, direction.protocol)
        flags |= _BY_PROTOCOL
    if direction.source_port:
        data += codec.be16(_SOURCE_PORT, direction.source_port)
        flags |= _BY_SOURCE_PORT
    if direction.destination_port:
        data += codec.be16(_DESTINATION_PORT, direction.destination_port)
        flags |= _BY_DESTINATION_PORT
    return data, flags


def _parse_direction(data: bytes, family: int) -> Direction:
    found = codec.attributes(data)
    addresses = codec.attributes(found.get(_ADDRESSES, b""))
    protocol = codec.attributes(found.get(_PROTOCOL, b""))
    return Direction(
        source=codec.to_address(addresses.get(_SOURCE[family], b"")),
        destination=codec.to_address(addresses.get(_DESTINATION[family], b"")),
        protocol=codec.to_number(protocol.get(_NUMBER)),
        source_port=codec.to_big_number(protocol.get(_SOURCE_PORT)),
        destination_port=codec.to_big_number(protocol.get(_DESTINATION_PORT)),
    )
