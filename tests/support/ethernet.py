"""Build, send and capture Ethernet frames on an interface."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from weft.domain.addresses import Address
from weft.kernel.netlink.codec import pack_address, pack_mac
from weft.kernel.netns import Namespace
from weft.lab.traffic import QUIET_S

ARP: Final = 0x0806
VLAN: Final = 0x8100
IPV4: Final = 0x0800
REQUEST, REPLY = 1, 2
BROADCAST: Final = "ff:ff:ff:ff:ff:ff"
_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, _PACKET_AUXDATA = 263, 1, 8
_MEMBERSHIP, _PROMISCUOUS = struct.Struct("=iHxxxxxxxxxx"), 1
_SIOCGIFINDEX, _INDEXED = 0x8933, struct.Struct("=16si20x")
_AUXDATA = struct.Struct("IIIHHHH")
_UDP_HEADER = struct.Struct(">HHHH")


def frame(target: str, source: str, kind: int, content: bytes) -> bytes:
    return pack_mac(target) + pack_mac(source) + struct.pack(">H", kind) + content


def arp(operation: int, *, sender: tuple[str, Address], target: tuple[str, Address]) -> bytes:
    (mac, address), (target_mac, target_address) = sender, target
    return (
        struct.pack(">HHBBH", 1, IPV4, 6, 4, operation)
        + pack_mac(mac)
        + pack_address(address)
        + pack_mac(target_mac)
        + pack_address(target_address)
    )


def datagram(source: Address, target: Address) -> bytes:
    """An empty UDP datagram in an IPv4 packet."""
    form, ends = struct.Struct(">BBHHHBBH"), pack_address(source) + pack_address(target)
    start = (0x45, 0, form.size + len(ends) + _UDP_HEADER.size, 0, 0, 64, socket.IPPROTO_UDP)
    checksum = 0xFFFF - sum(struct.unpack(">10H", form.pack(*start, 0) + ends)) % 0xFFFF
    return form.pack(*start, checksum) + ends + _UDP_HEADER.pack(5000, 5000, _UDP_HEADER.size, 0)


@contextmanager
def open_packet_socket(
    namespace: Namespace, kind: int = _ETH_P_ALL, *, interface: str = "eth0"
) -> Iterator[socket.socket]:
    """A promiscuous packet socket on an interface of a namespace."""
    with namespace.open_socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(kind)) as opened:
        opened.bind((interface, kind))
        _, index = _INDEXED.unpack(fcntl.ioctl(opened, _SIOCGIFINDEX, _INDEXED.pack(interface.encode(), 0)))
        opened.setsockopt(_SOL_PACKET, _PACKET_ADD_MEMBERSHIP, _MEMBERSHIP.pack(index, _PROMISCUOUS))
        opened.settimeout(QUIET_S)
        yield opened


def receives(sock: socket.socket, wanted: Callable[[bytes], bool], *, within: float = QUIET_S) -> bool:
    """Whether a matching frame arrives in time; frames that the pod sends do not count."""
    deadline = time.monotonic() + within
    while (remaining := deadline - time.monotonic()) > 0:
        sock.settimeout(remaining)
        try:
            data, (_, _, direction, *_) = sock.recvfrom(65_536)
        except TimeoutError:
            return False
        if direction != socket.PACKET_OUTGOING and wanted(data):
            return True
    return False


def tagged(tag: int, content: bytes) -> bytes:
    """A frame with a VLAN tag."""
    return content[:12] + struct.pack(">HH", VLAN, tag) + content[12:]


def received_vlan_tag(sock: socket.socket, wanted: Callable[[bytes], bool], *, within: float) -> int | None:
    """The VLAN tag of the next matching tagged frame, from the kernel's ancillary data."""
    sock.setsockopt(_SOL_PACKET, _PACKET_AUXDATA, 1)
    deadline = time.monotonic() + within
    while (remaining := deadline - time.monotonic()) > 0:
        sock.settimeout(remaining)
        try:
            data, ancillary, _, _ = sock.recvmsg(65_536, 64)
        except TimeoutError:
            return None
        for _, kind, auxdata in ancillary:
            _, _, _, _, _, tag, _ = _AUXDATA.unpack(auxdata)
            if kind == _PACKET_AUXDATA and tag and wanted(data):
                return int(tag)
    return None


def is_arp(data: bytes) -> bool:
    return data[12:14] == struct.pack(">H", ARP)


def is_from(mac: str) -> Callable[[bytes], bool]:
    """Match frames with this source MAC."""
    return lambda data: data[6:12] == pack_mac(mac)
