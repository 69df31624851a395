"""Who may say what: the entries that let a port speak with its MAC and its addresses (`ruleset`, `bridging`)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.netns.nft.bridge_filter import SEGMENTS
from weft.adapters.netns.nft.entries import Entry
from weft.domain.addresses import Address
from weft.domain.desired.state import Port
from weft.kernel.netlink.codec import pack_address, pack_mac
from weft.kernel.netlink.nft_set import Element, interface, key

_LINK_LOCAL = 0xFE80 << 112


def spoofguard_entries(port: Port) -> Iterator[Entry]:
    """What lets a port speak, and lets it be known when it speaks to itself."""
    for address in port.addresses:
        if port.segment:
            yield from _station_entries(port, address)
        else:
            yield Entry(f"ports{address.family}", _voice(port, address))
        yield Entry(f"ports_self{address.family}", Element(key=key(pack_address(address), pack_address(address))))


def _station_entries(port: Port, address: Address) -> Iterator[Entry]:
    """The same on a segment. There neighbours of v6 look for each other, also by link-local addresses."""
    yield Entry(f"stations{address.family}", _voice(port, address))
    if address.family == 6:
        own = link_local(port.mac)
        yield Entry("stations6", _voice(port, own))
        yield Entry("owners6", _voice(port, own))
        yield Entry("owners6", _voice(port, address))
        yield Entry("solicited6", Element(key=pack_address(address), value=pack_mac(port.mac)))


def segment_entry(bridge: str) -> Entry:
    """What lets packets be known that stay on a segment."""
    return Entry(SEGMENTS, Element(key=key(interface(bridge), interface(bridge))))


def _voice(port: Port, address: Address) -> Element:
    return Element(key=key(interface(port.interface), pack_mac(port.mac), pack_address(address)))


def link_local(mac: str) -> Address:
    """The address that a kernel gives a device with this MAC (RFC 4291, appendix A)."""
    packed = pack_mac(mac)
    identifier = bytes([packed[0] ^ 2]) + packed[1:3] + b"\xff\xfe" + packed[3:]
    return Address(6, _LINK_LOCAL | int.from_bytes(identifier, "big"))
