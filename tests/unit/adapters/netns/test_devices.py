"""Device names and MACs that are derived from VNIs and VTEP addresses are unique."""

from __future__ import annotations

from itertools import combinations

from weft.adapters.netns.devices import overlay_hop_mac, overlay_mac, overlay_name
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
