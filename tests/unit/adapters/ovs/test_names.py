"""What is told apart stays apart when it becomes a name in the switch."""

from __future__ import annotations

from itertools import combinations

from weft.adapters.netns.kernel_state import overlay_hop_mac, overlay_mac, overlay_name
from weft.domain.addresses import parse_address

# Without their dots some of these are the same.
ALIKE = ("10.1.11.1", "10.11.1.1", "101.1.1.1", "1.0.111.1", "10.1.1.11")


def test_tunnels_to_nodes_with_similar_addresses_are_not_confused() -> None:
    """W43: a node is known by a MAC that is made from its whole address; devices are named by the network's number."""
    vteps = [parse_address(text, field="vtep") for text in ALIKE]
    for one, other in combinations(vteps, 2):
        assert overlay_mac(one) != overlay_mac(other)
        assert overlay_hop_mac(one) != overlay_hop_mac(other)
    assert len({overlay_name(vni) for vni in (1, 11, 111, 1 << 23, (1 << 24) - 1)}) == 5
