"""Craft VXLAN packets (RFC 7348) by hand, as an attacker does: any outer source, VNI, inner MAC and inner source."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

from tests.support import inventory
from tests.support.ethernet import frame

from weft.domain.addresses import Address
from weft.kernel.netlink.codec import pack_address, pack_mac
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host

VXLAN_PORT = 4789
ETHER_TYPES = {4: 0x0800, 6: 0x86DD}
_FLAG_VNI = 1 << 27
_NEIGHBOR_ADVERT = 136
_KINDS = {4: socket.AF_INET, 6: socket.AF_INET6}
_UDP = socket.IPPROTO_UDP


def udp_packet(source: Address, target: Address, *, port: int, payload: bytes = b"inject", ttl: int = 64) -> bytes:
    """A UDP datagram in an IP packet with valid checksums: conntrack would drop others as invalid."""
    ends = pack_address(source) + pack_address(target)
    length = 8 + len(payload)
    header = struct.pack(">HHHH", 7777, port, length, 0)
    checksum = _checksum(ends + struct.pack(">IHH", length, 0, _UDP) + header + payload)
    datagram = struct.pack(">HHHH", 7777, port, length, checksum or 0xFFFF) + payload
    if source.family == 6:
        return struct.pack(">IHBB", 6 << 28, length, _UDP, ttl) + ends + datagram
    start = struct.pack(">BBHHHBB", 0x45, 0, 20 + length, 0, 0, ttl, _UDP)
    return start + struct.pack(">H", _checksum(start + b"\0\0" + ends)) + ends + datagram


def vxlan(vni: int, content: bytes) -> bytes:
    """The payload of the outer UDP datagram: the VXLAN header and an inner frame."""
    return struct.pack(">II", _FLAG_VNI, vni << 8) + content


def advertisement(target: Address, *, source: Address, to: Address, mac: str) -> bytes:
    """An unsolicited neighbour advertisement that overrides what its receiver knows (RFC 4861, 4.4)."""
    body = struct.pack(">I", 1 << 29) + pack_address(target) + b"\x02\x01" + pack_mac(mac)
    ends = pack_address(source) + pack_address(to)
    length, start = 4 + len(body), struct.pack(">BB", _NEIGHBOR_ADVERT, 0)
    pseudo_header = ends + struct.pack(">II", length, socket.IPPROTO_ICMPV6)
    checksum = _checksum(pseudo_header + start + b"\0\0" + body)
    header = struct.pack(">IHBB", 6 << 28, length, socket.IPPROTO_ICMPV6, 255)
    return header + ends + start + struct.pack(">H", checksum) + body


def behind_options(packet: bytes) -> bytes:
    """The IPv6 packet with a header of destination options, all padding, before its payload."""
    (length,) = struct.unpack(">H", packet[4:6])
    header = packet[:4] + struct.pack(">HB", length + 8, socket.IPPROTO_DSTOPTS) + packet[7:40]
    return header + packet[6:7] + b"\0\x01\x04\0\0\0\0" + packet[40:]


def inner_frame(mac: str, source: Address, target: Address, *, port: int, ttl: int = 64) -> bytes:
    """An inner frame with a UDP datagram, to the MAC of the node or of the pod."""
    packet = udp_packet(source, target, port=port, ttl=ttl)
    return frame(mac, "02:aa:aa:aa:aa:aa", ETHER_TYPES[source.family], packet)


def send(namespace: Namespace, target: str, payload: bytes) -> None:
    """Send a datagram to the tunnel port with an ordinary socket, as any process may."""
    kind = _KINDS[ip_address(target).version]
    with namespace.open_socket(kind, socket.SOCK_DGRAM) as sender, suppress(OSError):  # refused at once: no route
        sender.sendto(payload, (target, VXLAN_PORT))


def send_as_node(source: Host, target: Host, payload: bytes, *, outer: tuple[str, str] | None = None) -> None:
    """Send from a node's uplink by a packet socket, which no rule of that node sees, as a compromised node does.

    `outer` are the outer addresses; by default those of the two nodes.
    """
    with Namespace.open(source.netns) as namespace:
        send_raw(
            namespace,
            payload,
            macs=(link_mac(target.netns), link_mac(source.netns)),
            outer=outer or (source.address, target.address),
        )


def send_raw(namespace: Namespace, payload: bytes, *, macs: tuple[str, str], outer: tuple[str, str]) -> None:
    """Send from eth0 by a packet socket, with any target and source MAC and outer source and target address."""
    source, target = (_parse(text) for text in outer)
    packet = udp_packet(source, target, port=VXLAN_PORT, payload=payload)
    with _raw(namespace) as sender:
        sender.send(frame(*macs, ETHER_TYPES[source.family], packet))


@contextmanager
def _raw(namespace: Namespace) -> Iterator[socket.socket]:
    with namespace.open_socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as opened:
        opened.bind(("eth0", 0))
        yield opened


def link_mac(netns: Path, link: str = "eth0") -> str:
    return str(inventory.run_json(netns, "ip", "-j", "link", "show", link)[0]["address"])


def _parse(text: str) -> Address:
    parsed = ip_address(text)
    return Address(parsed.version, int(parsed))


def _checksum(data: bytes) -> int:
    data += bytes(len(data) % 2)
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
