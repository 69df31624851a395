"""The kernel's messages about packets; the lab has real ones."""

from __future__ import annotations

import struct
import time

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import parse_address
from weft.domain.errors import DatapathFault
from weft.kernel.netlink import codec
from weft.kernel.netlink.nflog import LoggedPacket, parse_logged_packet
from weft.kernel.packet_headers import Packet

HEADER = b"\x02\0\0\x57"
UDP_PACKET = bytes.fromhex("45000020 00010000 40110000 0a000001 0a000002 04d2 0050".replace(" ", ""))
ONE, TWO = (parse_address(text, field="address") for text in ("10.0.0.1", "10.0.0.2"))
PACKET = Packet(ONE, TWO, 17, 1234, 80)


def test_everything_that_is_told() -> None:
    payload = (
        HEADER
        + codec.be32(2, 0x80000222)
        + codec.attribute(3, struct.pack(">QQ", 1_700_000_000, 250_000))
        + codec.be32(4, 7)
        + codec.be32(5, 8)
        + codec.attribute(9, UDP_PACKET)
    )
    told = parse_logged_packet(payload)
    assert told == LoggedPacket(PACKET, mark=0x80000222, in_iface=7, out_iface=8, at=1_700_000_000.25)


def test_what_is_not_told_is_nothing_and_now() -> None:
    before = time.time()
    told = parse_logged_packet(HEADER + codec.attribute(9, UDP_PACKET))
    assert (told.packet, told.mark, told.in_iface, told.out_iface) == (PACKET, 0, 0, 0)
    assert before <= told.at <= time.time()


@given(st.binary(max_size=120) | st.binary(max_size=100).map(lambda data: HEADER + codec.attribute(9, data)))
def test_any_bytes_are_a_packet_or_a_fault(payload: bytes) -> None:
    try:
        parse_logged_packet(payload)
    except DatapathFault:
        return
