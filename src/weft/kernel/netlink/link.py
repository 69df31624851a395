"""Devices: veth pairs, bridges, ifb, macvlan, vxlan: made, altered, deleted and read (`include/uapi/linux/if_link.h`).

The mark of ours is the alias. The kernel takes none when it makes a device, so an `alter_link` with it goes into the
same batch: a process that dies cannot die between the two.

Whoever makes a device may choose its index (0 leaves it to the kernel), so that what belongs on the device can follow
in the same batch. `NetlinkError` with `EEXIST` or `EBUSY` says that the name or the index is taken.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgspec

from weft.domain.addresses import Address
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import CREATE, EXCLUSIVE, Request
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket

# The index of `lo`, in every namespace.
LOOPBACK: Final = 1

# The group that is told of devices (`RTNLGRP_LINK`).
LINKS: Final = 1

# IPv4 settings of a device, for `alter_protocols` (`IPV4_DEVCONF_…` in `ip.h`).
SEND_REDIRECTS, RP_FILTER = 6, 8

_NEWLINK, _DELLINK, _GETLINK, _NEWPROPERTY = 16, 17, 18, 108
_HEADER = struct.Struct("=BxHiII")  # family, device type, index, flags, which flags to change
_UP, _NO_RESOLUTION, _PROMISCUOUS = 1, 0x80, 0x100
_ADDRESS, _NAME, _MTU, _LINK, _MASTER, _INFO, _ALIAS, _AF_SPEC, _GROUP = 1, 3, 4, 5, 10, 18, 20, 26, 27
_NAMESPACE_FD, _EXTENT, _PROMISCUITY, _TX_QUEUES, _RX_QUEUES = 28, 29, 30, 31, 32
_WITHOUT_STATISTICS = 8
_PROPERTIES, _OTHER_NAME = 52, 53
_KIND, _DATA, _PORT_KIND, _PORT_DATA = 1, 2, 4, 5
_VETH_PEER = 1
_MACVLAN_MODE, _PASSES_ALL = 1, 8
_BRIDGE_SNOOPING = 23
_VXLAN_VNI, _VXLAN_LOCAL, _VXLAN_TOS, _VXLAN_LEARNING, _VXLAN_PORT, _VXLAN_LOCAL6 = 1, 4, 6, 7, 15, 17
_AS_INSIDE = 1
_INET_CONF, _INET6_GENERATION = 1, 8
_GENERATION_EUI64, _GENERATION_NONE = 0, 1
_PORT_FLAGS = {
    "hairpin": 4,
    "learning": 8,
    "flood": 9,
    "proxy_arp": 10,
    "multicast_flood": 27,
    "broadcast_flood": 30,
    "neighbour_suppression": 32,
    "isolated": 33,
}

_GONE = frozenset({errno.ENODEV})
_JOINED = frozenset({"veth", "macvlan"})


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """What every new device has. An empty MAC or an MTU of 0 leaves the choice to the kernel."""

    name: str
    index: int = 0
    mac: str = ""
    mtu: int = 0


class Vxlan(msgspec.Struct, frozen=True, kw_only=True):
    """What makes a device a tunnel: the network's number on the wire, and where the wire is."""

    vni: int
    port: int
    local: Address
    learning: bool = False


class PortFlags(msgspec.Struct, frozen=True, kw_only=True):
    """How a bridge treats one of its ports."""

    learning: bool = True
    flood: bool = True
    multicast_flood: bool = True
    broadcast_flood: bool = True
    # Whether it is spared questions that the bridge can answer, which then the bridge answers.
    neighbour_suppression: bool = False
    # Whether the bridge answers what ARP asks here, as far as it can; nothing is ever flooded to such a port.
    proxy_arp: bool = False
    isolated: bool = False
    hairpin: bool = False


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A device as the kernel describes it."""

    index: int
    name: str
    # `veth`, `bridge`, `vxlan` …; empty for one that is not made by request, such as `lo`.
    kind: str
    mac: str
    mtu: int
    # Whether it is meant to be up; what it is joined to may still be down.
    up: bool
    alias: str
    group: int
    # The index of the bridge it is a port of, or 0.
    master: int
    # The index of a veth's other end, or of what a macvlan stands on, perhaps in another namespace; 0: none.
    peer: int
    vxlan: Vxlan | None = None
    port: PortFlags | None = None
    # How many take all frames from it: a macvlan that is up and stands on it alone, and programs that capture.
    listeners: int = 0
    # What it may be called as well; see `add_name`.
    other_names: tuple[str, ...] = ()


def create_veth(end: Device, peer: Device, *, peer_namespace: int, master: int = 0, group: int = 0) -> Request:
    """A pair, both ends down: one here (on a bridge, in a group), the other born in the namespace of the descriptor.

    Indexes are chosen for both ends or for neither. With one queue each they are made in two thirds of the time and
    carry as much.
    """
    born = _device(peer) + codec.u32(_NAMESPACE_FD, peer_namespace)
    belonging = _numbers({_MASTER: master or None, _GROUP: group or None})
    payload = _device(end) + belonging + _info("veth", codec.nest(_VETH_PEER, born))
    return Request(_NEWLINK, CREATE | EXCLUSIVE, payload, "create veth", end.name)


def create_bridge(device: Device) -> Request:
    """A bridge, without spanning tree and without multicast snooping: nobody would ask, so it would forget members."""
    payload = _device(device) + _info("bridge", codec.u8(_BRIDGE_SNOOPING, 0))
    return Request(_NEWLINK, CREATE | EXCLUSIVE, payload, "create bridge", device.name)


def create_ifb(device: Device) -> Request:
    """A device that gives back what it is made to send, as if it had just come in where it came from."""
    return Request(_NEWLINK, CREATE | EXCLUSIVE, _device(device) + _info("ifb"), "create ifb", device.name)


def create_macvlan(device: Device, *, over: int, namespace: int) -> Request:
    """The only device to stand on another one of the namespace this is sent in, whose MAC it has; all frames are its.

    It is born, down, in the namespace of the descriptor.
    """
    payload = (
        _device(device)
        + codec.u32(_LINK, over)
        + codec.u32(_NAMESPACE_FD, namespace)
        + _info("macvlan", codec.u32(_MACVLAN_MODE, _PASSES_ALL))
    )
    return Request(_NEWLINK, CREATE | EXCLUSIVE, payload, "create macvlan", device.name)


def create_vxlan(device: Device, tunnel: Vxlan, *, namespace: int | None = None) -> Request:
    """A tunnel over the network of the namespace this is sent in, born in the namespace of the descriptor, if given.

    Packets bear outside the DSCP that they have inside.
    """
    payload = (
        _device(device)
        + (b"" if namespace is None else codec.u32(_NAMESPACE_FD, namespace))
        + _info(
            "vxlan",
            codec.u32(_VXLAN_VNI, tunnel.vni),
            codec.address(_VXLAN_LOCAL if tunnel.local.family == 4 else _VXLAN_LOCAL6, tunnel.local),
            codec.be16(_VXLAN_PORT, tunnel.port),
            codec.u8(_VXLAN_LEARNING, tunnel.learning),
            codec.u8(_VXLAN_TOS, _AS_INSIDE),
        )
    )
    return Request(_NEWLINK, CREATE | EXCLUSIVE, payload, "create vxlan", device.name)


def alter_link(
    index: int,
    *,
    up: bool | None = None,
    resolves: bool | None = None,
    name: str | None = None,
    mac: str | None = None,
    mtu: int | None = None,
    alias: str | None = None,
    group: int | None = None,
    master: int | None = None,
    namespace: int | None = None,
) -> Request:
    """Change what is given, leave the rest.

    `namespace` moves the device into that of the descriptor, under `name` if given. A `master` of 0 takes it off its
    bridge. One that `resolves` nothing sends to whomever it is told, and asks nobody for their MAC.
    """
    flags = (_UP if up else 0) | (_NO_RESOLUTION if resolves is False else 0)
    change = (0 if up is None else _UP) | (0 if resolves is None else _NO_RESOLUTION)
    payload = (
        _HEADER.pack(codec.AF_UNSPEC, 0, index, flags, change)
        + (b"" if name is None else codec.text(_NAME, name))
        + (b"" if mac is None else codec.mac(_ADDRESS, mac))
        + (b"" if alias is None else codec.attribute(_ALIAS, alias.encode()))
        + _numbers({_MTU: mtu, _GROUP: group, _MASTER: master, _NAMESPACE_FD: namespace})
    )
    return Request(_NEWLINK, 0, payload, "alter link", name or index)


def add_name(index: int, name: str) -> Request:
    """Another name for a device, of up to 127 characters; one that it has already is fine."""
    names = codec.nest(_PROPERTIES, codec.text(_OTHER_NAME, name))
    payload = _HEADER.pack(codec.AF_UNSPEC, 0, index, 0, 0) + names
    return Request(_NEWPROPERTY, CREATE | EXCLUSIVE, payload, "add name", name, frozenset({errno.EEXIST}))


def alter_protocols(index: int, *, link_local: bool, v4: Mapping[int, int] | None = None) -> Request:
    """Say whether the kernel gives the device an IPv6 address of its own, and its IPv4 settings by number.

    The address comes as soon as the device is up, therefore this goes before the request that brings it up: inside a
    single message the kernel would have it the other way round.
    """
    mode = codec.nest(
        codec.AF_INET6, codec.u8(_INET6_GENERATION, _GENERATION_EUI64 if link_local else _GENERATION_NONE)
    )
    settings = codec.nest(codec.AF_INET, codec.nest(_INET_CONF, _numbers(v4))) if v4 else b""
    payload = _HEADER.pack(codec.AF_UNSPEC, 0, index, 0, 0) + codec.nest(_AF_SPEC, settings, mode)
    return Request(_NEWLINK, 0, payload, "alter protocols of link", index)


def alter_port(index: int, flags: PortFlags) -> Request:
    """Say how its bridge treats a port. The kernel wants it in a message after the one that made it a port."""
    data = [codec.u8(number, getattr(flags, name)) for name, number in _PORT_FLAGS.items()]
    info = codec.nest(_INFO, codec.attribute(_PORT_KIND, b"bridge"), codec.nest(_PORT_DATA, *data))
    return Request(_NEWLINK, 0, _HEADER.pack(codec.AF_UNSPEC, 0, index, 0, 0) + info, "alter port", index)


@contextmanager
def gone_is_fine() -> Iterator[None]:
    """What is altered on a device that is no longer there needs no altering: it went with its namespace."""
    try:
        yield
    except NetlinkError as refusal:
        if refusal.errno != errno.ENODEV:
            raise


def delete_link(index: int) -> Request:
    """No such device; of a veth pair both ends. Waits about 20 ms for the kernel: see `delete_group`."""
    return Request(_DELLINK, 0, _HEADER.pack(0, 0, index, 0, 0), "delete link", index, _GONE)


def delete_group(group: int) -> Request:
    """No device of the group, which costs hardly more time than deleting a single one."""
    payload = _HEADER.pack(0, 0, 0, 0, 0) + codec.u32(_GROUP, group)
    return Request(_DELLINK, 0, payload, "delete link group", group, _GONE)


def read_links(netlink: NetlinkSocket, *, marked: str = "") -> list[Link]:
    """The devices of the namespace whose alias starts with the mark."""
    payload = _HEADER.pack(0, 0, 0, 0, 0) + codec.u32(_EXTENT, _WITHOUT_STATISTICS)
    links = map(parse_link, netlink.dump(Request(_GETLINK, 0, payload, "read", "links")))
    return [link for link in links if link.alias.startswith(marked)]


def read_link(netlink: NetlinkSocket, name: str) -> Link | None:
    """The device of that name, if there is one."""
    payload = _HEADER.pack(0, 0, 0, 0, 0) + codec.u32(_EXTENT, _WITHOUT_STATISTICS) + codec.text(_NAME, name)
    answer = netlink.get(Request(_GETLINK, 0, payload, "read link", name, _GONE))
    return None if answer is None else parse_link(answer)


def settle_link(netlink: NetlinkSocket, index: int) -> None:
    """Have the kernel find out now whether a device carries packets; else it does so when it gets round to it."""
    payload = _HEADER.pack(0, 0, index, 0, 0) + codec.u32(_EXTENT, _WITHOUT_STATISTICS)
    netlink.get(Request(_GETLINK, 0, payload, "settle link", index, _GONE))


def parse_link(payload: bytes) -> Link:
    """A device out of the kernel's description."""
    _, _, index, flags, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    info = codec.attributes(found.get(_INFO, b""))
    kind = codec.to_text(info.get(_KIND))
    return Link(
        index=index,
        name=codec.to_text(found.get(_NAME)),
        kind=kind,
        mac=codec.to_mac(found.get(_ADDRESS)),
        mtu=codec.to_number(found.get(_MTU)),
        up=bool(flags & _UP),
        alias=codec.to_text(found.get(_ALIAS)),
        group=codec.to_number(found.get(_GROUP)),
        master=codec.to_number(found.get(_MASTER)),
        peer=codec.to_number(found.get(_LINK)) if kind in _JOINED else 0,
        vxlan=_parse_vxlan(info.get(_DATA, b"")) if kind == "vxlan" else None,
        port=_parse_port(info.get(_PORT_DATA, b"")) if codec.to_text(info.get(_PORT_KIND)) == "bridge" else None,
        listeners=max(codec.to_number(found.get(_PROMISCUITY)) - bool(flags & _PROMISCUOUS), 0),
        other_names=tuple(codec.to_text(name) for _, name in codec.attribute_list(found.get(_PROPERTIES, b""))),
    )


def _parse_vxlan(data: bytes) -> Vxlan | None:
    """Nothing for a tunnel without a local address, which is none of ours."""
    found = codec.attributes(data)
    local = found.get(_VXLAN_LOCAL) or found.get(_VXLAN_LOCAL6)
    if local is None:
        return None
    return Vxlan(
        vni=codec.to_number(found.get(_VXLAN_VNI)),
        port=codec.to_big_number(found.get(_VXLAN_PORT)),
        local=codec.to_address(local),
        learning=bool(codec.to_number(found.get(_VXLAN_LEARNING))),
    )


def _parse_port(data: bytes) -> PortFlags:
    found = codec.attributes(data)
    return PortFlags(**{name: bool(codec.to_number(found.get(number))) for name, number in _PORT_FLAGS.items()})


def _device(device: Device) -> bytes:
    return (
        _HEADER.pack(codec.AF_UNSPEC, 0, device.index, 0, 0)
        + codec.text(_NAME, device.name)
        + (codec.mac(_ADDRESS, device.mac) if device.mac else b"")
        + (codec.u32(_MTU, device.mtu) if device.mtu else b"")
        + codec.u32(_TX_QUEUES, 1)
        + codec.u32(_RX_QUEUES, 1)
    )


def _numbers(values: Mapping[int, int | None]) -> bytes:
    return b"".join(codec.u32(kind, value) for kind, value in values.items() if value is not None)


def _info(kind: str, *data: bytes) -> bytes:
    return codec.nest(_INFO, codec.attribute(_KIND, kind.encode()), codec.nest(_DATA, *data))
