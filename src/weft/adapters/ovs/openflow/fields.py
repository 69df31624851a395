"""The fields of packets that flows match and write: OXM of OpenFlow 1.4 and Open vSwitch's own (ovs-fields(7)).

A field is named as ovs-ofctl names it. Numbers are plain integers whatever a field holds; `text` writes them as people
do.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from typing import Final

import msgspec

from weft.domain.errors import DatapathFault

_HEADER = struct.Struct("!HBB")  # class, field number and has-mask bit, length
_MATCH_HEADER = struct.Struct("!HH")
_BASIC, _NICIRA, _MORE_ND = 0x8000, 0x0001, 0x1000
_OXM_MATCH = 1


class Field(msgspec.Struct, frozen=True, gc=False):
    """A field: where it is in the wire's numbering, and how many bytes it has there."""

    name: str
    group: int
    number: int
    size: int

    @property
    def header(self) -> int:
        """As actions refer to it."""
        return self.group << 16 | self.number << 9 | self.size

    @property
    def bits(self) -> int:
        return _NARROW.get(self.name, self.size * 8)

    @property
    def whole(self) -> int:
        """The mask that leaves nothing out."""
        return (1 << self.size * 8) - 1


# Fields that have fewer bits than their bytes.
_NARROW = {"ip_dscp": 6, "vlan_vid": 13}

_BASIC_FIELDS: Mapping[str, tuple[int, int]] = {
    "in_port": (0, 4), "eth_dst": (3, 6), "eth_src": (4, 6), "eth_type": (5, 2), "vlan_vid": (6, 2), "ip_dscp": (8, 1),
    "ip_proto": (10, 1), "ip_src": (11, 4), "ip_dst": (12, 4), "tcp_src": (13, 2), "tcp_dst": (14, 2),
    "udp_src": (15, 2), "udp_dst": (16, 2), "sctp_src": (17, 2), "sctp_dst": (18, 2), "icmp_type": (19, 1),
    "icmp_code": (20, 1), "arp_op": (21, 2), "arp_spa": (22, 4), "arp_tpa": (23, 4), "arp_sha": (24, 6),
    "arp_tha": (25, 6), "ipv6_src": (26, 16), "ipv6_dst": (27, 16), "icmpv6_type": (29, 1), "icmpv6_code": (30, 1),
    "nd_target": (31, 16), "nd_sll": (32, 6), "nd_tll": (33, 6),
}  # fmt: skip
_NICIRA_FIELDS: Mapping[str, tuple[int, int]] = {
    **{f"reg{number}": (number, 4) for number in range(16)},
    "ip_frag": (26, 1), "nw_ttl": (29, 1), "ct_state": (105, 4), "ct_zone": (106, 2), "ct_mark": (107, 4),
    "ct_nw_proto": (119, 1), "ct_nw_src": (120, 4), "ct_nw_dst": (121, 4), "ct_ipv6_src": (122, 16),
    "ct_ipv6_dst": (123, 16), "ct_tp_src": (124, 2), "ct_tp_dst": (125, 2),
}  # fmt: skip

FIELDS: Final[Mapping[str, Field]] = MappingProxyType(
    {
        name: Field(name, group, number, size)
        for group, fields in (
            (_BASIC, _BASIC_FIELDS),
            (_NICIRA, _NICIRA_FIELDS),
            (_MORE_ND, {"nd_reserved": (1, 4), "nd_options_type": (2, 1)}),
        )
        for name, (number, size) in fields.items()
    }
)
_BY_NUMBER = {(field.group, field.number): field for field in FIELDS.values()}

_V4 = {"ip_src", "ip_dst", "arp_spa", "arp_tpa", "ct_nw_src", "ct_nw_dst"}
_V6 = {"ipv6_src", "ipv6_dst", "nd_target", "ct_ipv6_src", "ct_ipv6_dst"}
_MAC = {"eth_src", "eth_dst", "arp_sha", "arp_tha", "nd_sll", "nd_tll"}
_HEX = {"eth_type", "vlan_vid", "ct_state", "ct_mark", "nd_reserved", *(f"reg{number}" for number in range(16))}

IS_PIECE: Final = (1, 1)
# An `ip_frag` of a datagram's pieces: of all, and of all but the first, which alone has ports.
IS_LATER_PIECE: Final = (2, 2)
_PIECES = {IS_PIECE: "yes", IS_LATER_PIECE: "later"}


class Matched(msgspec.Struct, frozen=True, gc=False, order=True):
    """One condition of a flow: those bits of the field that the mask has are as in the value."""

    name: str
    value: int
    mask: int

    def __str__(self) -> str:
        field = FIELDS[self.name]
        if self.name == "ip_frag" and (self.value, self.mask) in _PIECES:
            return f"{self.name}={_PIECES[self.value, self.mask]}"
        value = text(field, self.value)
        return f"{self.name}={value}" if self.mask == field.whole else f"{self.name}={value}/{text(field, self.mask)}"


# Conditions that hold together, in the order of their fields' names.
Match = tuple[Matched, ...]


def match(conditions: Mapping[str, int | tuple[int, int]]) -> Match:
    """A match of values, or of values with masks. A mask of nothing is no condition."""
    return tuple(sorted(_matched(name, wanted) for name, wanted in conditions.items() if _mask(wanted)))


def _mask(wanted: int | tuple[int, int]) -> int:
    return wanted[1] if isinstance(wanted, tuple) else -1


def _matched(name: str, wanted: int | tuple[int, int]) -> Matched:
    whole = FIELDS[name].whole
    value, mask = wanted if isinstance(wanted, tuple) else (wanted, whole)
    return Matched(name, value & mask, mask)


def text(field: Field, number: int) -> str:
    """A value of a field as ovs-ofctl reads it."""
    if field.name in _V4:
        return str(IPv4Address(number))
    if field.name in _V6:
        return str(IPv6Address(number))
    if field.name in _MAC:
        return number.to_bytes(6, "big").hex(":")
    return hex(number) if field.name in _HEX else str(number)


def encode_field(field: Field, value: int) -> bytes:
    """A field with its value, as in a match or for `set_field`."""
    return field.header.to_bytes(4, "big") + value.to_bytes(field.size, "big")


def encode_match(conditions: Match) -> bytes:
    body = b"".join(_encode(each) for each in sorted(conditions, key=_prerequisites_first))
    length = _MATCH_HEADER.size + len(body)
    return _MATCH_HEADER.pack(_OXM_MATCH, length) + body + bytes(-length % 8)


def _prerequisites_first(condition: Matched) -> tuple[bool, int, int]:
    """What a field may be asked about depends on the lower layers and on `ct_state`, which therefore come before."""
    field = FIELDS[condition.name]
    return field.group != _BASIC, field.group, field.number


def _encode(condition: Matched) -> bytes:
    field = FIELDS[condition.name]
    if condition.mask == field.whole:
        return encode_field(field, condition.value)
    header = _HEADER.pack(field.group, field.number << 1 | 1, field.size * 2)
    return header + condition.value.to_bytes(field.size, "big") + condition.mask.to_bytes(field.size, "big")


def decode_match(data: bytes) -> tuple[Match, int]:
    """A match at the beginning of the data, and how many bytes it takes. Fields we do not know are left out."""
    kind, length = unpack(_MATCH_HEADER, data)
    if kind != _OXM_MATCH or length < _MATCH_HEADER.size or length > len(data):
        raise DatapathFault("openflow: not a match")
    return tuple(sorted(_decode_all(data[_MATCH_HEADER.size : length]))), length + 7 & ~7


def _decode_all(data: bytes) -> Iterator[Matched]:
    at = 0
    while at < len(data):
        group, number, length = unpack(_HEADER, data, at)
        at += _HEADER.size
        field, payload = _BY_NUMBER.get((group, number >> 1)), data[at : at + length]
        at += length
        if field is not None:
            yield _decode(field, payload, masked=bool(number & 1))


def _decode(field: Field, payload: bytes, *, masked: bool) -> Matched:
    if len(payload) != field.size * (1 + masked):
        raise DatapathFault(f"openflow: {field.name} has {len(payload)} bytes")
    value = int.from_bytes(payload[: field.size], "big")
    return Matched(field.name, value, int.from_bytes(payload[field.size :], "big") if masked else field.whole)


def decode_field(data: bytes) -> tuple[Field, int] | None:
    """A field with its value; nothing when we do not know it, or when it is a part of one."""
    group, number, length = unpack(_HEADER, data)
    field = _BY_NUMBER.get((group, number >> 1))
    payload = data[_HEADER.size : _HEADER.size + length]
    if field is None or number & 1 or len(payload) != field.size:
        return None
    return field, int.from_bytes(payload, "big")


def unpack(form: struct.Struct, data: bytes, at: int = 0) -> tuple[int, ...]:
    """The numbers at a place; a `DatapathFault` when the data ends before."""
    try:
        return form.unpack_from(data, at)
    except struct.error as error:
        raise DatapathFault("openflow: a message ends too early") from error


def told(conditions: Iterable[Matched]) -> str:
    return ",".join(map(str, conditions))
