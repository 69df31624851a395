"""Announce MACs behind the uplinks, so that physical switches learn a new location at once.

The announcement is a RARP broadcast from each MAC in each network, as hypervisors send it after a live migration:
no host answers it. MACs are derived from addresses, so switches may know a MAC from another node.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from weft.adapters.netns.devices import overlay_mac
from weft.domain.addresses import Address
from weft.domain.desired.segments import vlan_tag
from weft.domain.desired.state import Port, StateItem, VlanTrunk
from weft.kernel.netlink.codec import pack_mac

# A MAC, and the VLAN tag of its frames.
AnnouncedMac = tuple[str, int]

# linux/if_ether.h
_ETH_P_8021Q, _ETH_P_RARP, _ETH_P_IP = 0x8100, 0x8035, 0x0800
_BROADCAST = b"\xff" * 6
# RFC 903, in the format of ARP, with empty protocol addresses.
_RARP = struct.Struct(">HHBBH6s4x6s4x")
_ARPHRD_ETHER, _RARP_REQUEST = 1, 3


def announced_macs(items: Iterable[StateItem], vtep: Address) -> set[AnnouncedMac]:
    """The MACs of a node behind the uplinks: its own on each trunk, and those of endpoints on VLAN segments."""
    macs = set()
    for item in items:
        if isinstance(item, VlanTrunk):
            macs.add((overlay_mac(vtep), vlan_tag(item.number)))
        elif isinstance(item, Port) and vlan_tag(item.segment):
            macs.add((item.mac, vlan_tag(item.segment)))
    return macs


def rarp_frame(announced: AnnouncedMac) -> bytes:
    """The tagged RARP frame that announces a MAC."""
    mac, tag = announced
    own = pack_mac(mac)
    header = _BROADCAST + own + struct.pack(">HHH", _ETH_P_8021Q, tag, _ETH_P_RARP)
    return header + _RARP.pack(_ARPHRD_ETHER, _ETH_P_IP, 6, 4, _RARP_REQUEST, own, own)
