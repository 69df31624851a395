"""Who is behind which MAC: permanent neighbours, proxied addresses, forwarding entries of vxlan devices and bridges.

Written and read back as equal values, `put_` and `drop_` name an end state (`include/uapi/linux/neighbour.h`). They are
ours when their device is; what the kernel learnt by itself is not read.
"""

from __future__ import annotations

import errno
import struct

import msgspec

from weft.domain.addresses import Address
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import AF, AF_BRIDGE, AF_INET, AF_INET6, APPEND, CREATE, REPLACE, Request
from weft.kernel.netlink.socket import NetlinkSocket

_NEWNEIGH, _DELNEIGH, _GETNEIGH = 28, 29, 30
_HEADER = struct.Struct("=BxxxiHBB")  # family, device, state, flags, kind
_ADDRESS, _MAC, _MASTER = 1, 2, 9
_NO_ARP, _PERMANENT = 0x40, 0x80
# As a MAC of a vxlan device: frames for whom it has no entry. There may be several such entries.
EVERYONE = "00:00:00:00:00:00"
_SELF, _ON_MASTER, _PROXY = 0x2, 0x4, 0x8

_GONE = frozenset({errno.ENOENT, errno.ENODEV})


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """The MAC of an address on a device, for good: it is never asked for and never forgotten."""

    link: int
    address: Address
    mac: str

    def __str__(self) -> str:
        return f"{self.address} at {self.mac} on link {self.link}"


class Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """An address which is elsewhere, and for which we answer on this device."""

    link: int
    address: Address

    def __str__(self) -> str:
        return f"{self.address} on link {self.link}"


class Forwarding(msgspec.Struct, frozen=True, kw_only=True):
    """Where frames for a MAC go.

    With `remote`: a vxlan device sends them to that machine. Without: the bridge sends them out of its port `link`.
    """

    link: int
    mac: str
    remote: Address | None = None

    def __str__(self) -> str:
        return f"{self.mac} by link {self.link}" + ("" if self.remote is None else f" to {self.remote}")


def put_neighbour(neighbour: Neighbour) -> Request:
    return Request(_NEWNEIGH, CREATE | REPLACE, _encode_neighbour(neighbour), "add neighbour", neighbour)


def drop_neighbour(neighbour: Neighbour) -> Request:
    """No neighbour with that address on that device, whatever its MAC."""
    return Request(_DELNEIGH, 0, _encode_neighbour(neighbour), "delete neighbour", neighbour, _GONE)


def put_proxy(proxy: Proxy) -> Request:
    return Request(_NEWNEIGH, CREATE | REPLACE, _encode_proxy(proxy), "add proxy for", proxy)


def drop_proxy(proxy: Proxy) -> Request:
    return Request(_DELNEIGH, 0, _encode_proxy(proxy), "delete proxy for", proxy, _GONE)


def put_forwarding(entry: Forwarding) -> Request:
    """The entry, in place of another for the same MAC on the same device; beside it if the MAC is that of several."""
    flags = CREATE | (APPEND if entry.mac == EVERYONE or int(entry.mac[1], 16) & 1 else REPLACE)
    return Request(_NEWNEIGH, flags, _encode_forwarding(entry), "add forwarding of", entry)


def drop_forwarding(entry: Forwarding) -> Request:
    """No such entry. A port that has left its bridge has none."""
    return Request(_DELNEIGH, 0, _encode_forwarding(entry), "delete forwarding of", entry, _GONE | {errno.EOPNOTSUPP})


def read_neighbours(netlink: NetlinkSocket) -> list[Neighbour]:
    """The permanent neighbours of both families on all devices."""
    neighbours = (parse_neighbour(answer) for answer in _read(netlink, flags=0))
    return [neighbour for neighbour in neighbours if neighbour is not None]


def read_proxies(netlink: NetlinkSocket) -> list[Proxy]:
    """The proxied addresses of both families on all devices."""
    return [parse_proxy(answer) for answer in _read(netlink, flags=_PROXY)]


def read_forwardings(netlink: NetlinkSocket) -> list[Forwarding]:
    """The permanent entries of all vxlan devices and bridges, without those for a bridge's own MACs."""
    request = Request(_GETNEIGH, 0, _HEADER.pack(AF_BRIDGE, 0, 0, 0, 0), "read", "forwarding entries")
    entries = map(parse_forwarding, netlink.dump(request))
    return [entry for entry in entries if entry is not None]


def parse_neighbour(payload: bytes) -> Neighbour | None:
    """A neighbour, or nothing when it is not permanent."""
    _, link, state, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    if not state & _PERMANENT or _MAC not in found:
        return None
    return Neighbour(link=link, address=codec.to_address(found.get(_ADDRESS, b"")), mac=codec.to_mac(found[_MAC]))


def parse_proxy(payload: bytes) -> Proxy:
    _, link, _, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    return Proxy(link=link, address=codec.to_address(found.get(_ADDRESS, b"")))


def parse_forwarding(payload: bytes) -> Forwarding | None:
    """An entry, or nothing when it was learnt or is about a device's own MAC."""
    _, link, state, flags, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    remote = codec.to_address(found[_ADDRESS]) if _ADDRESS in found else None
    if remote is None and (_MASTER not in found or flags & _SELF or state != _NO_ARP):
        return None
    if remote is not None and not state & _PERMANENT:
        return None
    return Forwarding(link=link, mac=codec.to_mac(found.get(_MAC)), remote=remote)


def _read(netlink: NetlinkSocket, *, flags: int) -> list[bytes]:
    return [
        answer
        for family in (AF_INET, AF_INET6)
        for answer in netlink.dump(Request(_GETNEIGH, 0, _HEADER.pack(family, 0, 0, flags, 0), "read", "neighbours"))
    ]


def _encode_neighbour(neighbour: Neighbour) -> bytes:
    return (
        _HEADER.pack(AF[neighbour.address.family], neighbour.link, _PERMANENT, 0, 0)
        + codec.address(_ADDRESS, neighbour.address)
        + codec.mac(_MAC, neighbour.mac)
    )


def _encode_proxy(proxy: Proxy) -> bytes:
    header = _HEADER.pack(AF[proxy.address.family], proxy.link, _PERMANENT, _PROXY, 0)
    return header + codec.address(_ADDRESS, proxy.address)


def _encode_forwarding(entry: Forwarding) -> bytes:
    if entry.remote is None:
        return _HEADER.pack(AF_BRIDGE, entry.link, _NO_ARP, _ON_MASTER, 0) + codec.mac(_MAC, entry.mac)
    return (
        _HEADER.pack(AF_BRIDGE, entry.link, _NO_ARP | _PERMANENT, _SELF, 0)
        + codec.mac(_MAC, entry.mac)
        + codec.address(_ADDRESS, entry.remote)
    )
