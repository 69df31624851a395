"""Who speaks by the uplinks: the node in its networks of VLAN tags, and on segments every workload."""

from __future__ import annotations

from weft.adapters.ovs.ports.garp import announcement, spoofguard_entries
from weft.domain.addresses import Address
from weft.domain.desired.segments import wire_number
from weft.domain.desired.state import Overlay, Port, StateItem, VlanTrunk
from weft.domain.ids import TenantName
from weft.domain.model import NetworkTags

BLUE = TenantName("blue")
NUMBER = wire_number(NetworkTags(vlan=7))


def test_the_node_and_who_is_on_a_tagged_segment_speak() -> None:
    parts: list[StateItem] = [
        Overlay(BLUE, 5),
        VlanTrunk(BLUE, NUMBER),
        Port(BLUE, "wpa", "02:02:0a:00:00:01", (), NUMBER),
        Port(BLUE, "wpb", "02:02:0a:00:00:02", (), 5),
        Port(BLUE, "wpc", "02:02:0a:00:00:03", ()),
    ]
    assert spoofguard_entries(parts, Address(4, 0xC0000201)) == {("02:77:c0:00:02:01", 7), ("02:02:0a:00:00:01", 7)}


def test_a_voice_is_heard_with_its_tag_by_all() -> None:
    heard = announcement(("02:02:0a:00:00:01", 7))
    assert heard[:6] == b"\xff" * 6
    assert heard[6:12] == bytes.fromhex("02020a000001")
    assert heard[12:18].hex() == "810000078035"
