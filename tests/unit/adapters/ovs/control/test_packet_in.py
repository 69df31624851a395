"""What the switch tells of a refused packet, in our words."""

from __future__ import annotations

import struct

import pytest

from weft.adapters.netns.nft.policy_chains import SPOOFED
from weft.adapters.ovs.control.packet_in import drop_of
from weft.adapters.ovs.openflow.client import PacketIn
from weft.adapters.ovs.openflow.fields import encode_match, match
from weft.adapters.ovs.openflow.flows import OWNER
from weft.adapters.ovs.ovsdb.bridge import TENANT_MARK, SwitchPort
from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName

BLUE = TenantName("blue")
A, B = Address(4, 0x0A010001), Address(4, 0x0A010002)
PORTS = {
    number: SwitchPort(name=name, row="", number=number, given=number, error="", marks={TENANT_MARK: BLUE})
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


def told(frame: bytes = FRAME, *, cookie: int = OWNER, **fields: int) -> PacketIn:
    """As the switch says it, with what it knew of the packet."""
    body = struct.pack("!IHBBQ", 0xFFFFFFFF, len(frame), 1, 0, cookie)
    return PacketIn(body + encode_match(match(dict(fields))) + bytes(2) + frame, 12.5)


@pytest.mark.parametrize("frame", [FRAME, TAGGED])
def test_a_packet_that_a_rule_refuses(frame: bytes) -> None:
    drop = drop_of(told(frame, in_port=5, reg0=1, reg3=0x42, reg4=6), {1: BLUE}, PORTS)
    assert drop is not None
    assert (drop.tenant, drop.outcome, drop.reason) == (BLUE, 0x42, "")
    assert (drop.source, drop.source_port, drop.target, drop.target_port) == (A, 4000, B, 53)
    assert (drop.in_iface, drop.out_iface, drop.at) == ("wpa", "wpb", 12.5)


def test_a_reason_of_our_own_and_a_tenant_that_only_the_port_knows() -> None:
    drop = drop_of(told(in_port=5, reg3=SPOOFED), {1: BLUE}, PORTS)
    assert drop is not None
    assert (drop.tenant, drop.outcome, drop.reason) == (BLUE, 0, "weft/spoofed")


@pytest.mark.parametrize("strange", [told(ARP, in_port=5), told(in_port=5, cookie=7), told(in_port=9)])
def test_what_is_not_ours_or_not_of_ip_is_left_out(strange: PacketIn) -> None:
    assert drop_of(strange, {1: BLUE}, PORTS) is None


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_frame_hides_no_other(frame: bytes) -> None:
    """Whoever sends what only says it is of IP does not keep the operator from hearing about the rest."""
    round_of_three = [told(each, in_port=5, reg3=SPOOFED) for each in (FRAME, frame, FRAME)]
    found = [drop_of(each, {1: BLUE}, PORTS) for each in round_of_three]
    assert [drop and drop.source for drop in found] == [A, None, A]


def test_what_ends_too_early_is_a_fault() -> None:
    with pytest.raises(DatapathFault):
        drop_of(PacketIn(told(in_port=5).body[:20], 0.0), {}, PORTS)
