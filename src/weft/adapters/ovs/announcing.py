"""Who is behind an uplink makes itself heard there, so that the switches outside know the way when it is a new one.

A frame that nobody has to answer, from each MAC in each network (RARP, as virtual machines send it when they move).
A bond does so by itself when another of its members has its turn.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

from weft.adapters.linux.facts import overlay_mac
from weft.adapters.linux.wire import pack_mac
from weft.adapters.ovs.ground import Ground
from weft.domain.errors import DatapathFault
from weft.domain.nodeview import Part, Port, Trunk
from weft.domain.segments import vlan_tag

Voice = tuple[str, int]
"""A MAC, and the tag it speaks with."""

_VLAN, _RARP = 0x8100, 0x8035
_TO_ALL = b"\xff" * 6
_FORM = struct.Struct(">HHBBH6s4x6s4x")
_ASKS = (1, 0x0800, 6, 4, 3)


def voices_of(parts: Iterable[Part], ground: Ground) -> set[Voice]:
    """Who of this node speaks by the uplinks: the node itself and, on segments, every workload."""
    voices = set()
    for part in parts:
        if isinstance(part, Trunk):
            voices.add((overlay_mac(ground.vtep), vlan_tag(part.number)))
        elif isinstance(part, Port) and vlan_tag(part.segment):
            voices.add((part.mac, vlan_tag(part.segment)))
    return voices


def announce(voices: Iterable[Voice], uplink: str) -> None:
    """Have them heard at an uplink of the caller's namespace."""
    try:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as mouth:
            mouth.bind((uplink, 0))
            for mac, tag in sorted(voices):
                own = pack_mac(mac)
                mouth.send(_TO_ALL + own + struct.pack(">HHH", _VLAN, tag, _RARP) + _FORM.pack(*_ASKS, own, own))
    except OSError as error:
        raise DatapathFault(f"uplink {uplink}: nobody can be announced there: {error.strerror}") from error
