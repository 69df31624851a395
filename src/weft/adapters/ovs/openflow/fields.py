"""Match fields: OXM of OpenFlow 1.4 and Open vSwitch's NXM extensions (ovs-fields(7)), encoded and decoded.

Fields have the names that ovs-ofctl uses. Values are plain integers; `text` formats them as ovs-ofctl does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from types import MappingProxyType
from typing import Final

import msgspec

from weft.adapters.ovs.openflow.constants import ERICOXM_OF, NXM_NX, OFPMT_OXM, OXM_OF
from weft.domain.errors import DatapathFault

_HEADER = struct.Struct("!HBB")  # class, field number and has-mask bit, length
_MATCH_HEADER = struct.Struct("!HH")


class Field(msgspec.Struct, frozen=True, gc=False):
    """A match field: its OXM class, field number, and size in bytes."""

    name: str
    group: int
    number: int
    size: int

    @property
    def header(self) -> int:
        """The OXM header without the mask bit, as actions refer to a field."""
        return self.group << 16 | self.number << 9 | self.size

    @property
    def bits(self) -> int:
        return _NARROW.get(self.name, self.size * 8)

    @property
    def exact_mask(self) -> int:
        """The mask of an exact match."""
        return (1 << self.size * 8) - 1


# Fields that use fewer bits than their bytes have.
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
            (OXM_OF, _BASIC_FIELDS),
            (NXM_NX, _NICIRA_FIELDS),
            (ERICOXM_OF, {"nd_reserved": (1, 4), "nd_options_type": (2, 1)}),
        )
        for name, (number, size) in fields.items()
    }
)
_BY_NUMBER = {(field.group, field.number): field for field in FIELDS.values()}

_V4 = {"ip_src", "ip_dst", "arp_spa", "arp_tpa", "ct_nw_src", "ct_nw_dst"}
_V6 = {"ipv6_src", "ipv6_dst", "nd_target", "ct_ipv6_src", "ct_ipv6_dst"}
_MAC = {"eth_src", "eth_dst", "arp_sha", "arp_tha", "nd_sll", "nd_tll"}
_HEX = {"eth_type", "vlan_vid", "ct_state", "ct_mark", "nd_reserved", *(f"reg{number}" for number in range(16))}

# `ip_frag` of any fragment, and of a later one. Only the first fragment has ports.
ANY_FRAGMENT: Final = (1, 1)
LATER_FRAGMENT: Final = (2, 2)
_FRAGMENTS = {ANY_FRAGMENT: "yes", LATER_FRAGMENT: "later"}


class Matched(msgspec.Struct, frozen=True, gc=False, order=True):
    """One field of a match: value and mask."""

    name: str
    value: int
    mask: int

    def __str__(self) -> str:
        field = FIELDS[self.name]
        if self.name == "ip_frag" and (self.value, self.mask) in _FRAGMENTS:
            return f"{self.name}={_FRAGMENTS[self.value, self.mask]}"
        value = text(field, self.value)
        if self.mask == field.exact_mask:
            return f"{self.name}={value}"
        return f"{self.name}={value}/{text(field, self.mask)}"


# Sorted by field name, so that equal matches compare equal.
Match = tuple[Matched, ...]


def match(conditions: Mapping[str, int | tuple[int, int]]) -> Match:
    """Build a match from values or (value, mask) pairs. A zero mask matches everything and is left out."""
    return tuple(sorted(_matched(name, wanted) for name, wanted in conditions.items() if _mask(wanted)))


def _mask(wanted: int | tuple[int, int]) -> int:
    return wanted[1] if isinstance(wanted, tuple) else -1


def _matched(name: str, wanted: int | tuple[int, int]) -> Matched:
    value, mask = wanted if isinstance(wanted, tuple) else (wanted, FIELDS[name].exact_mask)
    return Matched(name, value & mask, mask)


def text(field: Field, number: int) -> str:
    """Format a field's value as ovs-ofctl reads it."""
    if field.name in _V4:
        return str(IPv4Address(number))
    if field.name in _V6:
        return str(IPv6Address(number))
    if field.name in _MAC:
        return number.to_bytes(6, "big").hex(":")
    return hex(number) if field.name in _HEX else str(number)


def encode_field(field: Field, value: int) -> bytes:
    """Encode a field with its value, for a match or for `set_field`."""
    return field.header.to_bytes(4, "big") + value.to_bytes(field.size, "big")


def encode_match(conditions: Match) -> bytes:
    body = b"".join(_encode(each) for each in sorted(conditions, key=_prerequisites_first))
    length = _MATCH_HEADER.size + len(body)
    return _MATCH_HEADER.pack(OFPMT_OXM, length) + body + bytes(-length % 8)


def _prerequisites_first(condition: Matched) -> tuple[bool, int, int]:
    """Sort key for the wire: OVS requires a field's prerequisites (eth_type, ip_proto, ct_state) before it."""
    field = FIELDS[condition.name]
    return field.group != OXM_OF, field.group, field.number


def _encode(condition: Matched) -> bytes:
    field = FIELDS[condition.name]
    if condition.mask == field.exact_mask:
        return encode_field(field, condition.value)
    header = _HEADER.pack(field.group, field.number << 1 | 1, field.size * 2)
    return header + condition.value.to_bytes(field.size, "big") + condition.mask.to_bytes(field.size, "big")


def decode_match(data: bytes) -> tuple[Match, int]:
    """Decode the match at the start of the data; return it and its padded length. Unknown fields are left out."""
    kind, length = unpack(_MATCH_HEADER, data)
    if kind != OFPMT_OXM or length < _MATCH_HEADER.size or length > len(data):
        raise DatapathFault("openflow: bad match")
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
        raise DatapathFault(f"openflow: bad length {len(payload)} of field {field.name}")
    value = int.from_bytes(payload[: field.size], "big")
    return Matched(field.name, value, int.from_bytes(payload[field.size :], "big") if masked else field.exact_mask)


def decode_field(data: bytes) -> tuple[Field, int] | None:
    """Decode a field and its value; None when the field is unknown or masked."""
    group, number, length = unpack(_HEADER, data)
    field = _BY_NUMBER.get((group, number >> 1))
    payload = data[_HEADER.size : _HEADER.size + length]
    if field is None or number & 1 or len(payload) != field.size:
        return None
    return field, int.from_bytes(payload, "big")


def unpack(layout: struct.Struct, data: bytes, at: int = 0) -> tuple[int, ...]:
    """Unpack a struct at an offset; `DatapathFault` when the data is shorter."""
    try:
        return layout.unpack_from(data, at)
    except struct.error as error:
        raise DatapathFault("openflow: truncated message") from error


def format_match(conditions: Iterable[Matched]) -> str:
    return ",".join(map(str, conditions))
