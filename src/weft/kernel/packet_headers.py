"""Parse IPv4 and IPv6 headers, extension headers included, down to the ports. Pure."""

from __future__ import annotations

import struct
from typing import NamedTuple

from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault
from weft.domain.policy.model.protocols import PORTED

_V4 = struct.Struct(">B5xHxB2x4s4s")  # version and length, fragment, protocol, source, target
_V6 = struct.Struct(">6xBx16s16s")  # next header, source, target
_PORTS = struct.Struct(">HH")
_FRAGMENT_OFFSET_V4 = 0x1FFF
_FRAGMENT_OFFSET_V6 = 0xFFF8
_FRAGMENT, _AUTHENTICATION = 44, 51
_EXTENSIONS = frozenset({0, 43, 60, 135, 139, 140, _FRAGMENT, _AUTHENTICATION})


class Packet(NamedTuple):
    """The 5-tuple of a packet. Ports are 0 when the protocol has none or this is not the first fragment."""

    source: Address
    target: Address
    protocol: int
    source_port: int = 0
    target_port: int = 0


def parse_packet(data: bytes) -> Packet:
    """Parse the start of a packet from its IP header on; `DatapathFault` when it is not an IP packet."""
    version = data[0] >> 4 if data else 0
    if version == 4 and len(data) >= _V4.size:
        return _parse_v4(data)
    if version == 6 and len(data) >= _V6.size:
        return _parse_v6(data)
    raise DatapathFault(f"{len(data)} bytes are not an IP packet")


def _parse_v4(data: bytes) -> Packet:
    lead, fragment, protocol, source, target = _V4.unpack_from(data)
    ends = Address(4, int.from_bytes(source, "big")), Address(4, int.from_bytes(target, "big"))
    if fragment & _FRAGMENT_OFFSET_V4:
        return Packet(*ends, protocol)
    return Packet(*ends, protocol, *_ports(data, protocol, (lead & 0x0F) * 4))


def _parse_v6(data: bytes) -> Packet:
    protocol, source, target = _V6.unpack_from(data)
    ends = Address(6, int.from_bytes(source, "big")), Address(6, int.from_bytes(target, "big"))
    offset = _V6.size
    while protocol in _EXTENSIONS and len(data) >= offset + 8:
        kind, (protocol, length) = protocol, data[offset : offset + 2]
        # The length unit differs: 8 bytes after the first 8, but 4 bytes minus 2 for AH (RFC 4302); a fragment
        # header has no length and is always 8 bytes (RFC 8200).
        if kind == _FRAGMENT:
            if int.from_bytes(data[offset + 2 : offset + 4], "big") & _FRAGMENT_OFFSET_V6:
                return Packet(*ends, protocol)
            offset += 8
        else:
            offset += (length + 2) * 4 if kind == _AUTHENTICATION else (length + 1) * 8
    return Packet(*ends, protocol, *_ports(data, protocol, offset))


def _ports(data: bytes, protocol: int, offset: int) -> tuple[int, int]:
    if protocol not in PORTED or len(data) < offset + _PORTS.size:
        return 0, 0
    source, target = _PORTS.unpack_from(data, offset)
    return source, target
