"""Who may say what: the entries that let a port speak with its MAC and its addresses (`ruleset`)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.linux.elements import Element, interface, key
from weft.adapters.linux.entries import Entry
from weft.adapters.linux.wire import pack_address, pack_mac
from weft.domain.nodeview import Port


def voices_of(port: Port) -> Iterator[Entry]:
    """What lets a port speak, and lets it be known when it speaks to itself."""
    for address in port.addresses:
        element = Element(key=key(interface(port.interface), pack_mac(port.mac), pack_address(address)))
        yield Entry(f"ports{address.family}", element)
        yield Entry(f"ports_self{address.family}", Element(key=key(pack_address(address), pack_address(address))))
