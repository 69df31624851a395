"""Headers of packets, as the kernel hands them over, and any other bytes."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import parse_address
from weft.domain.errors import DatapathFault
from weft.kernel.packet_headers import Packet, parse_packet

TCP, UDP, ICMP, ICMPV6, SCTP = 6, 17, 1, 58, 132
ONE4, TWO4 = (parse_address(text, field="address") for text in ("10.0.0.1", "10.0.0.2"))
ONE6, TWO6 = (parse_address(text, field="address") for text in ("fd00::1", "fd00::2"))
PORTS = struct.pack(">HH", 1234, 80)


def v4(protocol: int, rest: bytes, *, fragment: int = 0, options: bytes = b"") -> bytes:
    lead = 0x45 + len(options) // 4
    ends = bytes((10, 0, 0, 1, 10, 0, 0, 2))
    return struct.pack(">BBHHHBBH", lead, 0, 40, 7, fragment, 64, protocol, 0) + ends + options + rest


def v6(protocol: int, rest: bytes) -> bytes:
    one, two = (address.number.to_bytes(16, "big") for address in (ONE6, TWO6))
    return struct.pack(">IHBB", 0x60000000, len(rest), protocol, 64) + one + two + rest


def extension(following: int, length: int = 0) -> bytes:
    return bytes((following, length)) + bytes(6 + length * 8)


@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP])
def test_ports(protocol: int) -> None:
    assert parse_packet(v4(protocol, PORTS)) == Packet(ONE4, TWO4, protocol, 1234, 80)
    assert parse_packet(v4(protocol, PORTS, options=bytes(8))) == Packet(ONE4, TWO4, protocol, 1234, 80)
    assert parse_packet(v6(protocol, PORTS)) == Packet(ONE6, TWO6, protocol, 1234, 80)


@pytest.mark.parametrize("protocol", [ICMP, ICMPV6, 47, 253])
def test_protocols_without_ports(protocol: int) -> None:
    assert parse_packet(v4(protocol, PORTS)) == Packet(ONE4, TWO4, protocol)
    assert parse_packet(v6(protocol, PORTS)) == Packet(ONE6, TWO6, protocol)


def test_a_later_fragment_has_no_ports() -> None:
    assert parse_packet(v4(UDP, PORTS, fragment=0x2000)) == Packet(ONE4, TWO4, UDP, 1234, 80)
    assert parse_packet(v4(UDP, PORTS, fragment=0x20B9)) == Packet(ONE4, TWO4, UDP)
    first, later = (bytes((UDP, 0)) + offset.to_bytes(2, "big") + bytes(4) for offset in (1, 0x5A8))
    assert parse_packet(v6(44, first + PORTS)) == Packet(ONE6, TWO6, UDP, 1234, 80)
    assert parse_packet(v6(44, later + PORTS)) == Packet(ONE6, TWO6, UDP)


def test_extension_headers_are_passed_over() -> None:
    rest = extension(60) + extension(43, 2) + extension(51) + bytes((TCP, 1)) + bytes(10) + PORTS
    assert parse_packet(v6(0, rest)) == Packet(ONE6, TWO6, TCP, 1234, 80)


def test_what_was_cut_off_is_not_made_up() -> None:
    assert parse_packet(v4(TCP, PORTS[:3])) == Packet(ONE4, TWO4, TCP)
    assert parse_packet(v6(0, extension(TCP, 9)[:20])) == Packet(ONE6, TWO6, TCP)


@given(
    st.binary(max_size=80)
    | st.builds(v4, st.integers(0, 255), st.binary(max_size=40), fragment=st.integers(0, 0xFFFF))
    | st.builds(v6, st.integers(0, 255), st.binary(max_size=80))
)
def test_any_bytes_are_a_packet_or_a_fault(data: bytes) -> None:
    try:
        packet = parse_packet(data)
    except DatapathFault:
        return
    assert 0 <= packet.source_port <= 65535
    assert 0 <= packet.target_port <= 65535
