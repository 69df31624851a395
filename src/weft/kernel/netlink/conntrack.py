"""Conntrack entries: read, select and delete (`linux/netfilter/nfnetlink_conntrack.h`).

An entry has an original and a reply tuple. With NAT they are not mirror images: the client is the source of the
original tuple, and the server that really replies is the source of the reply tuple.

Recent kernels delete by filter (CTA_FILTER) in a third of a millisecond. We use it for IPv4 only: with an IPv6 address
the kernel matches the entries of all other addresses (seen on 6.18). For IPv6, and for kernels without CTA_FILTER, we
dump the table and select here, which takes 10 to 30 ms with the usual 262,144 buckets.
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
from weft.kernel.uapi.conntrack import (
    CTA_FILTER,
    CTA_FILTER_F_CTA_IP_DST,
    CTA_FILTER_F_CTA_IP_SRC,
    CTA_FILTER_F_CTA_PROTO_DST_PORT,
    CTA_FILTER_F_CTA_PROTO_NUM,
    CTA_FILTER_F_CTA_PROTO_SRC_PORT,
    CTA_ID,
    CTA_IP_V4_DST,
    CTA_IP_V4_SRC,
    CTA_IP_V6_DST,
    CTA_IP_V6_SRC,
    CTA_PROTO_DST_PORT,
    CTA_PROTO_NUM,
    CTA_PROTO_SRC_PORT,
    CTA_TUPLE_IP,
    CTA_TUPLE_ORIG,
    CTA_TUPLE_PROTO,
    CTA_TUPLE_REPLY,
    CTA_ZONE,
    IPCTNL_MSG_CT_DELETE,
    IPCTNL_MSG_CT_GET,
    NFNL_SUBSYS_CTNETLINK,
)

# nfnetlink message types: the subsystem in the high byte, the command in the low one.
_CT_GET = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_GET
_CT_DELETE = NFNL_SUBSYS_CTNETLINK << 8 | IPCTNL_MSG_CT_DELETE
_HEADER = struct.Struct(">BBH")  # struct nfgenmsg: family, version, resource id
_SOURCE = {4: CTA_IP_V4_SRC, 6: CTA_IP_V6_SRC}
_DESTINATION = {4: CTA_IP_V4_DST, 6: CTA_IP_V6_DST}

_GONE = frozenset({errno.ENOENT})
# How kernels without CTA_FILTER reply.
_NO_FILTER_SUPPORT = frozenset({errno.EOPNOTSUPP, errno.EINVAL})
# Up to so many addresses, deleting by filter is faster than dumping the table once.
_MAX_FILTERED_ADDRESSES = 16


class Direction(msgspec.Struct, frozen=True, kw_only=True):
    """One tuple of an entry. In a pattern, None and 0 match everything."""

    source: Address | None = None
    destination: Address | None = None
    protocol: int = 0
    source_port: int = 0
    destination_port: int = 0

    def matches(self, found: Direction) -> bool:
        """Whether a tuple has all that this pattern gives."""
        return (
            self.source in (None, found.source)
            and self.destination in (None, found.destination)
            and self.protocol in (0, found.protocol)
            and self.source_port in (0, found.source_port)
            and self.destination_port in (0, found.destination_port)
        )


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    """Selects the entries that match in both directions."""

    original: Direction = Direction()
    reply: Direction = Direction()

    def matches(self, connection: Connection) -> bool:
        return self.original.matches(connection.original) and self.reply.matches(connection.reply)


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A conntrack entry, and the attributes that identify exactly this one (tuple, id, zone)."""

    original: Direction
    reply: Direction
    handle: bytes


def flush_addresses(netlink: NetlinkSocket, addresses: Set[Address]) -> None:
    """Delete all entries in which one of the addresses is the client or the server that replies."""
    for family in (4, 6):
        members = {address for address in addresses if address.family == family}
        if family == 4 and len(members) <= _MAX_FILTERED_ADDRESSES:
            tuples = [Direction(source=address) for address in members]
            patterns = [pattern for each in tuples for pattern in (Pattern(original=each), Pattern(reply=each))]
            flush_matching(netlink, patterns, family=family)
        elif members:
            found = read_connections(netlink, family=family)
            delete_connections(
                netlink, (each for each in found if {each.original.source, each.reply.source} & members), family=family
            )


def flush_matching(netlink: NetlinkSocket, patterns: Sequence[Pattern], *, family: int) -> None:
    """Delete the entries that match any of the patterns: policy evaluates their next packet as a first one."""
    header = _HEADER.pack(AF[family], 0, 0)
    if family == 4:
        try:
            netlink.send_batch(
                [Request(_CT_DELETE, 0, header + encode_filter(item), "flush conntrack", item) for item in patterns]
            )
        except NetlinkError as error:
            if error.errno not in _NO_FILTER_SUPPORT:
                raise
        else:
            return
    found = read_connections(netlink, family=family)
    delete_connections(
        netlink, (each for each in found if any(pattern.matches(each) for pattern in patterns)), family=family
    )


def delete_connections(netlink: NetlinkSocket, connections: Iterable[Connection], *, family: int) -> None:
    """Delete exactly these entries; those that have expired meanwhile are ignored."""
    header = _HEADER.pack(AF[family], 0, 0)
    netlink.send_batch(
        [
            Request(_CT_DELETE, 0, header + each.handle, "delete conntrack entry", each.original, _GONE)
            for each in connections
        ]
    )


def read_connections(netlink: NetlinkSocket, *, family: int) -> list[Connection]:
    """Read all entries of the network namespace."""
    request = Request(_CT_GET, 0, _HEADER.pack(AF[family], 0, 0), "read", "conntrack")
    return [parse_connection(reply) for reply in netlink.dump(request)]


def parse_connection(payload: bytes) -> Connection:
    """Decode a conntrack entry."""
    number, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    family = codec.to_family(number)
    original = found.get(CTA_TUPLE_ORIG, b"")
    return Connection(
        original=_parse_direction(original, family),
        reply=_parse_direction(found.get(CTA_TUPLE_REPLY, b""), family),
        handle=codec.nest(CTA_TUPLE_ORIG, original)
        + b"".join(codec.attribute(kind, found[kind]) for kind in (CTA_ID, CTA_ZONE) if kind in found),
    )


def encode_filter(pattern: Pattern) -> bytes:
    """Encode a pattern: the tuples, and the flags that say which of their fields the kernel compares."""
    flags = b""
    directions = b""
    for kind, direction in ((CTA_TUPLE_ORIG, pattern.original), (CTA_TUPLE_REPLY, pattern.reply)):
        addresses, by_address = _encode_addresses(direction)
        protocol, by_protocol = _encode_protocol(direction)
        directions += codec.nest(kind, codec.nest(CTA_TUPLE_IP, addresses), codec.nest(CTA_TUPLE_PROTO, protocol))
        flags += codec.u32(kind, by_address | by_protocol)
    return directions + codec.nest(CTA_FILTER, flags)


def _encode_addresses(direction: Direction) -> tuple[bytes, int]:
    data, flags = b"", 0
    if direction.source is not None:
        data += codec.address(_SOURCE[direction.source.family], direction.source)
        flags |= CTA_FILTER_F_CTA_IP_SRC
    if direction.destination is not None:
        data += codec.address(_DESTINATION[direction.destination.family], direction.destination)
        flags |= CTA_FILTER_F_CTA_IP_DST
    return data, flags


def _encode_protocol(direction: Direction) -> tuple[bytes, int]:
    data, flags = b"", 0
    if direction.protocol:
        data += codec.u8(CTA_PROTO_NUM, direction.protocol)
        flags |= CTA_FILTER_F_CTA_PROTO_NUM
    if direction.source_port:
        data += codec.be16(CTA_PROTO_SRC_PORT, direction.source_port)
        flags |= CTA_FILTER_F_CTA_PROTO_SRC_PORT
    if direction.destination_port:
        data += codec.be16(CTA_PROTO_DST_PORT, direction.destination_port)
        flags |= CTA_FILTER_F_CTA_PROTO_DST_PORT
    return data, flags


def _parse_direction(data: bytes, family: int) -> Direction:
    found = codec.attributes(data)
    addresses = codec.attributes(found.get(CTA_TUPLE_IP, b""))
    protocol = codec.attributes(found.get(CTA_TUPLE_PROTO, b""))
    return Direction(
        source=codec.to_address(addresses.get(_SOURCE[family], b"")),
        destination=codec.to_address(addresses.get(_DESTINATION[family], b"")),
        protocol=codec.to_int(protocol.get(CTA_PROTO_NUM)),
        source_port=codec.to_int_be(protocol.get(CTA_PROTO_SRC_PORT)),
        destination_port=codec.to_int_be(protocol.get(CTA_PROTO_DST_PORT)),
    )
