"""Device names and MACs that are derived from VNIs and VTEP addresses are unique."""

from __future__ import annotations

from itertools import combinations

from weft.adapters.netns.devices import OVERLAY_MACS, next_hop, overlay_hop_mac, overlay_mac, overlay_name
from weft.domain.addresses import parse_address

# Some of these are equal without the dots.
ALIKE = ("10.1.11.1", "10.11.1.1", "101.1.1.1", "1.0.111.1", "10.1.1.11")


def test_tunnels_to_nodes_with_similar_addresses_are_distinct() -> None:
    """W43: the MAC of a node contains its complete address, the name of an overlay device its VNI."""
    vteps = [parse_address(text, field="vtep") for text in ALIKE]
    for one, other in combinations(vteps, 2):
        assert overlay_mac(one) != overlay_mac(other)
        assert overlay_hop_mac(one) != overlay_hop_mac(other)
    assert len({overlay_name(vni) for vni in (1, 11, 111, 1 << 23, (1 << 24) - 1)}) == 5


def test_M7_nodes_whose_ipv6_addresses_share_their_low_32_bits_are_distinct() -> None:
    """Each has its own MAC and next hop: with one of either, all packets for both would go to one of them."""
    vteps = [parse_address(f"2001:db8:{number}::1", field="vtep") for number in range(1, 40)]
    vteps.append(parse_address("0.0.0.1", field="vtep"))
    for derive in (overlay_mac, overlay_hop_mac, next_hop):
        assert len({derive(vtep) for vtep in vteps}) == len(vteps), derive.__name__


def test_macs_of_vxlan_devices_are_unicast_and_recognizable() -> None:
    for text in (*ALIKE, "2001:db8::1", "fd00::1"):
        mac = int(overlay_mac(vtep := parse_address(text, field="vtep")).replace(":", ""), 16)
        assert mac >> 40 & 3 == 2  # unicast, locally administered
        assert int(overlay_hop_mac(vtep).replace(":", ""), 16) == mac | 1 << 40
        ranges = [[int(part.replace(":", ""), 16) for part in each] for each in OVERLAY_MACS]
        assert sum(mac & mask == base for base, mask in ranges) == 1
