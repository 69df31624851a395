"""Anti-spoofing entries: the MAC and addresses that a port may send from (`base`, `bridge_filter`)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.netns.devices import link_local
from weft.adapters.netns.nft.bridge_filter import SAME_BRIDGE
from weft.adapters.netns.nft.entries import Entry
from weft.domain.addresses import Address
from weft.domain.desired.state import Port
from weft.kernel.netlink.codec import pack_address, pack_mac
from weft.kernel.netlink.nft_set import Element, interface, key


def spoofguard_entries(port: Port) -> Iterator[Entry]:
    """Yield the entries that allow a port to send, and that detect its packets to itself."""
    for address in port.addresses:
        if port.segment:
            yield from _l2_entries(port, address)
        else:
            yield Entry(f"l3_spoofguard{address.family}", _allowed_source(port, address))
        yield Entry(f"hairpin_self{address.family}", Element(key=key(pack_address(address), pack_address(address))))


def _l2_entries(port: Port, address: Address) -> Iterator[Entry]:
    """Yield the entries of the bridge table. In v6 they include neighbour discovery, also by link-local address."""
    yield Entry(f"l2_spoofguard{address.family}", _allowed_source(port, address))
    yield Entry(f"local_ips{address.family}", Element(key=pack_address(address)))
    if address.family == 6:
        own = link_local(port.mac)
        yield Entry("l2_spoofguard6", _allowed_source(port, own))
        yield Entry("nd_owners", _allowed_source(port, own))
        yield Entry("nd_owners", _allowed_source(port, address))
        yield Entry("ns_target_mac", Element(key=pack_address(address), value=pack_mac(port.mac)))


def segment_entry(bridge: str) -> Entry:
    """Return the entry by which packets that stay on a bridge are recognized."""
    return Entry(SAME_BRIDGE, Element(key=key(interface(bridge), interface(bridge))))


def _allowed_source(port: Port, address: Address) -> Element:
    return Element(key=key(interface(port.interface), pack_mac(port.mac), pack_address(address)))
