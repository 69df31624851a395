"""Drops decoded from packet-in messages."""

from __future__ import annotations

import struct

import pytest

from weft.adapters.netns.drop_reasons import DROP_SPOOFED
from weft.adapters.ovs.control.packet_in import decode_drop
from weft.adapters.ovs.openflow.client import PacketIn
from weft.adapters.ovs.openflow.fields import encode_match, match
from weft.adapters.ovs.openflow.flows import OWNER
from weft.adapters.ovs.ovsdb.bridge import TENANT_KEY, SwitchPort
from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName

BLUE = TenantName("blue")
A, B = Address(4, 0x0A010001), Address(4, 0x0A010002)
PORTS = {
    number: SwitchPort(
        name=name, row="", ofport=number, assigned_ofport=number, error="", external_ids={TENANT_KEY: BLUE}
    )
    for number, name in ((5, "wpa"), (6, "wpb"))
}
DATAGRAM = (
    struct.pack("!BBHHHBBH4s4s", 0x45, 0, 28, 0, 0, 64, 17, 0, A.number.to_bytes(4, "big"), B.number.to_bytes(4, "big"))
    + struct.pack("!HHHH", 4000, 53, 8, 0)
)  # fmt: skip
FRAME = bytes(12) + b"\x08\x00" + DATAGRAM
TAGGED = bytes(12) + b"\x81\x00\x00\x07\x08\x00" + DATAGRAM
ARP = bytes(12) + b"\x08\x06" + bytes(28)
MALFORMED = {
    "no-ip": bytes(12) + b"\x08\x00" + bytes(40),
    "no-end": bytes(12) + b"\x08\x00" + DATAGRAM[:10],
    "no-packet": bytes(12) + b"\x86\xdd",
    "no-type": bytes(12) + b"\x81\x00",
}


def packet_in(frame: bytes = FRAME, *, cookie: int = OWNER, **fields: int) -> PacketIn:
    """A packet-in message of the switch, with the fields of its match."""
    body = struct.pack("!IHBBQ", 0xFFFFFFFF, len(frame), 1, 0, cookie)
    return PacketIn(body + encode_match(match(dict(fields))) + bytes(2) + frame, 12.5)


@pytest.mark.parametrize("frame", [FRAME, TAGGED])
def test_a_packet_dropped_by_a_policy_rule(frame: bytes) -> None:
    drop = decode_drop(packet_in(frame, in_port=5, reg0=1, reg3=0x42, reg4=6), {1: BLUE}, PORTS)
    assert drop is not None
    assert (drop.tenant, drop.verdict_id, drop.reason) == (BLUE, 0x42, "")
    assert (drop.source, drop.source_port, drop.target, drop.target_port) == (A, 4000, B, 53)
    assert (drop.in_iface, drop.out_iface, drop.at) == ("wpa", "wpb", 12.5)


def test_a_built_in_reason_with_the_tenant_of_the_port() -> None:
    drop = decode_drop(packet_in(in_port=5, reg3=DROP_SPOOFED), {1: BLUE}, PORTS)
    assert drop is not None
    assert (drop.tenant, drop.verdict_id, drop.reason) == (BLUE, 0, "weft/spoofed")


@pytest.mark.parametrize("message", [packet_in(ARP, in_port=5), packet_in(in_port=5, cookie=7), packet_in(in_port=9)])
def test_foreign_and_non_ip_packets_are_ignored(message: PacketIn) -> None:
    assert decode_drop(message, {1: BLUE}, PORTS) is None


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_frame_does_not_affect_others(frame: bytes) -> None:
    """A workload that sends invalid IP packets cannot suppress drop events of others."""
    messages = [packet_in(data, in_port=5, reg3=DROP_SPOOFED) for data in (FRAME, frame, FRAME)]
    found = [decode_drop(message, {1: BLUE}, PORTS) for message in messages]
    assert [drop and drop.source for drop in found] == [A, None, A]


def test_a_truncated_message_is_a_fault() -> None:
    with pytest.raises(DatapathFault):
        decode_drop(PacketIn(packet_in(in_port=5).body[:20], 0.0), {}, PORTS)
