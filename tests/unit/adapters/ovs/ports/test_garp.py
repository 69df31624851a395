"""Which MACs are announced behind the uplinks, and the announcement."""

from __future__ import annotations

from weft.adapters.ovs.ports.garp import announced_macs, rarp_frame
from weft.domain.addresses import Address
from weft.domain.desired.segments import encap_id
from weft.domain.desired.state import Overlay, Port, StateItem, VlanTrunk
from weft.domain.ids import TenantName
from weft.domain.model import NetworkTags

BLUE = TenantName("blue")
NUMBER = encap_id(NetworkTags(vlan=7))


def test_the_node_and_endpoints_on_vlan_segments_are_announced() -> None:
    items: list[StateItem] = [
        Overlay(BLUE, 5),
        VlanTrunk(BLUE, NUMBER),
        Port(BLUE, "wpa", "02:02:0a:00:00:01", (), NUMBER),
        Port(BLUE, "wpb", "02:02:0a:00:00:02", (), 5),
        Port(BLUE, "wpc", "02:02:0a:00:00:03", ()),
    ]
    assert announced_macs(items, Address(4, 0xC0000201)) == {("02:77:c0:00:02:01", 7), ("02:02:0a:00:00:01", 7)}


def test_a_rarp_frame_is_a_tagged_broadcast() -> None:
    frame = rarp_frame(("02:02:0a:00:00:01", 7))
    assert frame[:6] == b"\xff" * 6
    assert frame[6:12] == bytes.fromhex("02020a000001")
    assert frame[12:18].hex() == "810000078035"
