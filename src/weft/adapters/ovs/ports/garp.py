"""Who is behind an uplink makes itself heard there, so that the switches outside know the way when it is a new one.

A frame that nobody has to answer, from each MAC in each network (RARP, as virtual machines send it when they move).
MACs are made from addresses: where one was before, and how long ago, is no concern of who has it now.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from weft.adapters.netns.kernel_state import overlay_mac
from weft.domain.addresses import Address
from weft.domain.desired.segments import vlan_tag
from weft.domain.desired.state import Port, StateItem, VlanTrunk
from weft.kernel.netlink.codec import pack_mac

# A MAC, and the tag it speaks with.
Voice = tuple[str, int]

_VLAN, _RARP = 0x8100, 0x8035
_TO_ALL = b"\xff" * 6
_FORM = struct.Struct(">HHBBH6s4x6s4x")
_ASKS = (1, 0x0800, 6, 4, 3)


def spoofguard_entries(parts: Iterable[StateItem], vtep: Address) -> set[Voice]:
    """Who of a node speaks by the uplinks: the node itself, known by its vtep, and on segments every workload."""
    voices = set()
    for part in parts:
        if isinstance(part, VlanTrunk):
            voices.add((overlay_mac(vtep), vlan_tag(part.number)))
        elif isinstance(part, Port) and vlan_tag(part.segment):
            voices.add((part.mac, vlan_tag(part.segment)))
    return voices


def announcement(voice: Voice) -> bytes:
    """The frame by which somebody is heard."""
    mac, tag = voice
    own = pack_mac(mac)
    return _TO_ALL + own + struct.pack(">HHH", _VLAN, tag, _RARP) + _FORM.pack(*_ASKS, own, own)
