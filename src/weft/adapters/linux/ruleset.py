"""The nftables table of a tenant's space: what may come out of a port (`nft` is its judge in tests).

A packet from a port passes only with the MAC and an address of that port: two sets hold who may say what, and a port
that is in neither says nothing. Routers do not live in pods, so what only routers say is dropped first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from weft.adapters.linux.elements import (
    INET,
    Element,
    SetName,
    drop_elements,
    interface,
    key,
    put_elements,
    read_elements,
)
from weft.adapters.linux.netlink import NetlinkSocket
from weft.adapters.linux.wire import Request, pack_address, pack_mac, to_address, to_mac
from weft.domain.addresses import Address
from weft.domain.nodeview import Port

TABLE = "weft"
PORT_PREFIX = "wp"

BASE = f"""\
add table inet {TABLE}
add set inet {TABLE} ports4 {{ type ifname . ether_addr . ipv4_addr; }}
add set inet {TABLE} ports6 {{ type ifname . ether_addr . ipv6_addr; }}
add chain inet {TABLE} ingress {{ type filter hook prerouting priority -310; policy accept; }}
add chain inet {TABLE} from_port
flush chain inet {TABLE} ingress
flush chain inet {TABLE} from_port
add rule inet {TABLE} ingress iifname "{PORT_PREFIX}*" jump from_port
add rule inet {TABLE} from_port icmpv6 type {{ nd-router-advert, nd-redirect }} drop
add rule inet {TABLE} from_port iifname . ether saddr . ip saddr @ports4 accept
add rule inet {TABLE} from_port iifname . ether saddr . ip6 saddr @ports6 accept
add rule inet {TABLE} from_port drop
"""


LIST_SETS = f"list table inet {TABLE}"
SETS = tuple(SetName(INET, TABLE, f"ports{family}") for family in (4, 6))


class Voice(NamedTuple):
    """A member of the sets: this port may speak with this MAC and this address."""

    interface: str
    mac: str
    address: Address

    def __str__(self) -> str:
        return f"{self.interface} with {self.mac} and {self.address}"


def voices_of(port: Port) -> list[Voice]:
    """What lets a port speak."""
    return [Voice(port.interface, port.mac, address) for address in port.addresses]


def put_voices(voices: Iterable[Voice]) -> list[Request]:
    return [request for name, elements in _by_set(voices) for request in put_elements(name, elements)]


def drop_voices(voices: Iterable[Voice]) -> list[Request]:
    return [request for name, elements in _by_set(voices) for request in drop_elements(name, elements)]


def read_voices(netlink: NetlinkSocket) -> Iterator[Voice]:
    """The voices that are in the sets."""
    for name in SETS:
        for element in read_elements(netlink, name):
            yield _decode(element.key)


def _by_set(voices: Iterable[Voice]) -> Iterator[tuple[SetName, list[Element]]]:
    listed = list(voices)
    for name, family in zip(SETS, (4, 6), strict=True):
        elements = [Element(key=_encode(voice)) for voice in listed if voice.address.family == family]
        if elements:
            yield name, elements


def _encode(voice: Voice) -> bytes:
    return key(interface(voice.interface), pack_mac(voice.mac), pack_address(voice.address))


def _decode(data: bytes) -> Voice:
    """Fields are padded to multiples of four bytes: 16 for the interface, 6 and 2 for the MAC, then the address."""
    return Voice(data[:16].rstrip(b"\0").decode(), to_mac(data[16:22]), to_address(data[24:]))
