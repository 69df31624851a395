"""Neighbours, proxy ARP/ND entries, and FDB entries of VXLAN devices and bridges (`linux/neighbour.h`).

Each is one frozen value: what `read_` returns equals what `put_` wrote. `put_` and `drop_` are idempotent. An entry is
ours when its device is; entries that the kernel learned are not read.
"""

from __future__ import annotations

import errno
import struct

import msgspec

from weft.domain.addresses import Address
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import AF, AF_BRIDGE, AF_INET, AF_INET6, Request
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.uapi.netlink import NLM_F_APPEND, NLM_F_CREATE, NLM_F_REPLACE
from weft.kernel.uapi.rtnetlink import (
    NDA_DST,
    NDA_LLADDR,
    NDA_MASTER,
    NTF_MASTER,
    NTF_PROXY,
    NTF_SELF,
    NUD_NOARP,
    NUD_PERMANENT,
    RTM_DELNEIGH,
    RTM_GETNEIGH,
    RTM_NEWNEIGH,
)

_HEADER = struct.Struct("=BxxxiHBB")  # family, device, state, flags, kind
# The default FDB entry of a VXLAN device: it replicates frames for unknown MACs to every such entry's remote.
DEFAULT_FDB_MAC = "00:00:00:00:00:00"

_GONE = frozenset({errno.ENOENT, errno.ENODEV})


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A permanent neighbour: the kernel neither resolves nor expires it."""

    link: int
    address: Address
    mac: str

    def __str__(self) -> str:
        return f"{self.address} at {self.mac} on link {self.link}"


class Proxy(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy entry: the kernel answers ARP or ND for the address on this device."""

    link: int
    address: Address

    def __str__(self) -> str:
        return f"{self.address} on link {self.link}"


class FdbEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An FDB entry: of a VXLAN device, for a MAC behind the VTEP `remote`; of a bridge, without it, behind a port."""

    link: int
    mac: str
    remote: Address | None = None

    def __str__(self) -> str:
        return f"{self.mac} by link {self.link}" + ("" if self.remote is None else f" to {self.remote}")


def put_neighbour(neighbour: Neighbour) -> Request:
    return Request(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, _encode_neighbour(neighbour), "add neighbour", neighbour)


def drop_neighbour(neighbour: Neighbour) -> Request:
    """Delete the neighbour of that address on that device, whatever its MAC."""
    return Request(RTM_DELNEIGH, 0, _encode_neighbour(neighbour), "delete neighbour", neighbour, _GONE)


def put_proxy(proxy: Proxy) -> Request:
    return Request(RTM_NEWNEIGH, NLM_F_CREATE | NLM_F_REPLACE, _encode_proxy(proxy), "add proxy for", proxy)


def drop_proxy(proxy: Proxy) -> Request:
    return Request(RTM_DELNEIGH, 0, _encode_proxy(proxy), "delete proxy for", proxy, _GONE)


def put_fdb_entry(entry: FdbEntry) -> Request:
    """Add an FDB entry: in place of another for a unicast MAC, beside others for a group MAC or the default entry."""
    flags = NLM_F_CREATE | (
        NLM_F_APPEND if entry.mac == DEFAULT_FDB_MAC or int(entry.mac[1], 16) & 1 else NLM_F_REPLACE
    )
    return Request(RTM_NEWNEIGH, flags, _encode_fdb_entry(entry), "add FDB entry", entry)


def drop_fdb_entry(entry: FdbEntry) -> Request:
    """Delete an FDB entry. EOPNOTSUPP: the port has left its bridge, and its entries went with it."""
    return Request(RTM_DELNEIGH, 0, _encode_fdb_entry(entry), "delete FDB entry", entry, _GONE | {errno.EOPNOTSUPP})


def read_neighbours(netlink: NetlinkSocket) -> list[Neighbour]:
    """Read the permanent neighbours of both families on all devices."""
    neighbours = (parse_neighbour(answer) for answer in _read(netlink, flags=0))
    return [neighbour for neighbour in neighbours if neighbour is not None]


def read_proxies(netlink: NetlinkSocket) -> list[Proxy]:
    """Read the proxy entries of both families on all devices."""
    return [parse_proxy(answer) for answer in _read(netlink, flags=NTF_PROXY)]


def read_fdb(netlink: NetlinkSocket) -> list[FdbEntry]:
    """Read the static FDB entries of all VXLAN devices and bridges, without those for a bridge's own MACs."""
    request = Request(RTM_GETNEIGH, 0, _HEADER.pack(AF_BRIDGE, 0, 0, 0, 0), "read", "FDB entries")
    entries = map(parse_fdb_entry, netlink.dump(request))
    return [entry for entry in entries if entry is not None]


def parse_neighbour(payload: bytes) -> Neighbour | None:
    """Decode a neighbour; None when it is not permanent."""
    _, link, state, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    if not state & NUD_PERMANENT or NDA_LLADDR not in found:
        return None
    return Neighbour(link=link, address=codec.to_address(found.get(NDA_DST, b"")), mac=codec.to_mac(found[NDA_LLADDR]))


def parse_proxy(payload: bytes) -> Proxy:
    _, link, _, _, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    return Proxy(link=link, address=codec.to_address(found.get(NDA_DST, b"")))


def parse_fdb_entry(payload: bytes) -> FdbEntry | None:
    """Decode an FDB entry; None when it was learned or is for a device's own MAC."""
    _, link, state, flags, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    remote = codec.to_address(found[NDA_DST]) if NDA_DST in found else None
    if remote is None and (NDA_MASTER not in found or flags & NTF_SELF or state != NUD_NOARP):
        return None
    if remote is not None and not state & NUD_PERMANENT:
        return None
    return FdbEntry(link=link, mac=codec.to_mac(found.get(NDA_LLADDR)), remote=remote)


def _read(netlink: NetlinkSocket, *, flags: int) -> list[bytes]:
    return [
        answer
        for family in (AF_INET, AF_INET6)
        for answer in netlink.dump(Request(RTM_GETNEIGH, 0, _HEADER.pack(family, 0, 0, flags, 0), "read", "neighbours"))
    ]


def _encode_neighbour(neighbour: Neighbour) -> bytes:
    return (
        _HEADER.pack(AF[neighbour.address.family], neighbour.link, NUD_PERMANENT, 0, 0)
        + codec.address(NDA_DST, neighbour.address)
        + codec.mac(NDA_LLADDR, neighbour.mac)
    )


def _encode_proxy(proxy: Proxy) -> bytes:
    header = _HEADER.pack(AF[proxy.address.family], proxy.link, NUD_PERMANENT, NTF_PROXY, 0)
    return header + codec.address(NDA_DST, proxy.address)


def _encode_fdb_entry(entry: FdbEntry) -> bytes:
    if entry.remote is None:
        return _HEADER.pack(AF_BRIDGE, entry.link, NUD_NOARP, NTF_MASTER, 0) + codec.mac(NDA_LLADDR, entry.mac)
    return (
        _HEADER.pack(AF_BRIDGE, entry.link, NUD_NOARP | NUD_PERMANENT, NTF_SELF, 0)
        + codec.mac(NDA_LLADDR, entry.mac)
        + codec.address(NDA_DST, entry.remote)
    )
