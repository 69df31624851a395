"""Links: create, change, delete and read veth, bridge, ifb, macvlan and vxlan devices (`linux/if_link.h`).

The alias (`IFLA_IFALIAS`) marks a device as ours. The kernel ignores it in the request that creates a device, so a
`change_link` with the alias goes into the same batch: no crash can separate the two.

The caller may choose the ifindex (0 leaves it to the kernel), so that addresses and routes of the device can follow in
the same batch. `NetlinkError` with `EEXIST` or `EBUSY` means that the name or the ifindex is taken.
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
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.uapi.netlink import NLM_F_CREATE, NLM_F_EXCL
from weft.kernel.uapi.rtnetlink import (
    IFF_NOARP,
    IFF_PROMISC,
    IFF_UP,
    IFLA_ADDRESS,
    IFLA_AF_SPEC,
    IFLA_ALT_IFNAME,
    IFLA_BR_MCAST_SNOOPING,
    IFLA_BRPORT_BCAST_FLOOD,
    IFLA_BRPORT_ISOLATED,
    IFLA_BRPORT_LEARNING,
    IFLA_BRPORT_MCAST_FLOOD,
    IFLA_BRPORT_MODE,
    IFLA_BRPORT_NEIGH_SUPPRESS,
    IFLA_BRPORT_PROXYARP,
    IFLA_BRPORT_UNICAST_FLOOD,
    IFLA_EXT_MASK,
    IFLA_GROUP,
    IFLA_IFALIAS,
    IFLA_IFNAME,
    IFLA_INET6_ADDR_GEN_MODE,
    IFLA_INET_CONF,
    IFLA_INFO_DATA,
    IFLA_INFO_KIND,
    IFLA_INFO_SLAVE_DATA,
    IFLA_INFO_SLAVE_KIND,
    IFLA_LINK,
    IFLA_LINKINFO,
    IFLA_MACVLAN_MODE,
    IFLA_MASTER,
    IFLA_MTU,
    IFLA_NET_NS_FD,
    IFLA_NUM_RX_QUEUES,
    IFLA_NUM_TX_QUEUES,
    IFLA_PROMISCUITY,
    IFLA_PROP_LIST,
    IFLA_VXLAN_ID,
    IFLA_VXLAN_LEARNING,
    IFLA_VXLAN_LOCAL,
    IFLA_VXLAN_LOCAL6,
    IFLA_VXLAN_PORT,
    IFLA_VXLAN_TOS,
    IN6_ADDR_GEN_MODE_EUI64,
    IN6_ADDR_GEN_MODE_NONE,
    MACVLAN_MODE_PASSTHRU,
    RTEXT_FILTER_SKIP_STATS,
    RTM_DELLINK,
    RTM_GETLINK,
    RTM_NEWLINK,
    RTM_NEWLINKPROP,
    VETH_INFO_PEER,
)

# The ifindex of `lo` in every network namespace.
LOOPBACK_IFINDEX: Final = 1


_HEADER = struct.Struct("=BxHiII")  # family, device type, index, flags, which flags to change
# The VXLAN driver takes TOS 1 as "inherit": copy the inner DSCP to the outer header.
_TOS_INHERIT = 1
_PORT_FLAGS = {
    "hairpin": IFLA_BRPORT_MODE,
    "learning": IFLA_BRPORT_LEARNING,
    "flood": IFLA_BRPORT_UNICAST_FLOOD,
    "proxy_arp": IFLA_BRPORT_PROXYARP,
    "multicast_flood": IFLA_BRPORT_MCAST_FLOOD,
    "broadcast_flood": IFLA_BRPORT_BCAST_FLOOD,
    "neighbour_suppression": IFLA_BRPORT_NEIGH_SUPPRESS,
    "isolated": IFLA_BRPORT_ISOLATED,
}

_GONE = frozenset({errno.ENODEV})
_JOINED = frozenset({"veth", "macvlan"})


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of any new device. An empty MAC or an MTU of 0 leaves the choice to the kernel."""

    name: str
    index: int = 0
    mac: str = ""
    mtu: int = 0


class Vxlan(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a VXLAN device: VNI, UDP port and local VTEP address."""

    vni: int
    port: int
    local: Address
    learning: bool = False


class PortFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Bridge port settings (`IFLA_BRPORT_*`)."""

    learning: bool = True
    flood: bool = True
    multicast_flood: bool = True
    broadcast_flood: bool = True
    # The bridge answers ARP and ND requests towards this port from its neighbour table and does not flood them.
    neighbour_suppression: bool = False
    # The bridge answers ARP requests received on this port. The kernel floods nothing to such a port.
    proxy_arp: bool = False
    isolated: bool = False
    hairpin: bool = False


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """A device as the kernel reports it."""

    index: int
    name: str
    # `veth`, `bridge`, `vxlan` and so on; empty for devices without IFLA_LINKINFO, such as `lo`.
    kind: str
    mac: str
    mtu: int
    # Administrative state (IFF_UP). The carrier may still be down.
    up: bool
    alias: str
    group: int
    # The ifindex of its bridge, or 0.
    master: int
    # The ifindex of a veth's peer or a macvlan's lower device, perhaps in another network namespace; 0: none.
    peer: int
    vxlan: Vxlan | None = None
    port: PortFlags | None = None
    # Promiscuous users other than the administrator: a passthru macvlan that is up, and packet captures.
    promiscuous_users: int = 0
    # Alternative names (IFLA_ALT_IFNAME); see `add_altname`.
    altnames: tuple[str, ...] = ()


def create_veth(end: Device, peer: Device, *, peer_namespace: int, master: int = 0, group: int = 0) -> Request:
    """Create a veth pair, both ends down: one here, its peer in the namespace of the descriptor.

    Choose the ifindex of both ends or of neither.
    """
    # The peer is created in its namespace: moving it afterwards costs an RCU grace period, some 20 ms.
    peer_info = _device(peer) + codec.u32(IFLA_NET_NS_FD, peer_namespace)
    membership = _u32_attributes({IFLA_MASTER: master or None, IFLA_GROUP: group or None})
    payload = _device(end) + membership + _link_info("veth", codec.nest(VETH_INFO_PEER, peer_info))
    return Request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, payload, "create veth", end.name)


def create_bridge(device: Device) -> Request:
    """Create a bridge without spanning tree and without multicast snooping."""
    # Snooping needs a querier. Without one the bridge ages out group members and multicast stops.
    payload = _device(device) + _link_info("bridge", codec.u8(IFLA_BR_MCAST_SNOOPING, 0))
    return Request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, payload, "create bridge", device.name)


def create_ifb(device: Device) -> Request:
    """Create an ifb: what it transmits is received again on the device that it was redirected from."""
    payload = _device(device) + _link_info("ifb")
    return Request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, payload, "create ifb", device.name)


def create_macvlan(device: Device, *, over: int, namespace: int) -> Request:
    """Create a macvlan in passthru mode: it takes the lower device's MAC and all of its frames.

    The lower device is in the socket's namespace; the macvlan is created, down, in that of the descriptor.
    """
    payload = (
        _device(device)
        + codec.u32(IFLA_LINK, over)
        + codec.u32(IFLA_NET_NS_FD, namespace)
        + _link_info("macvlan", codec.u32(IFLA_MACVLAN_MODE, MACVLAN_MODE_PASSTHRU))
    )
    return Request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, payload, "create macvlan", device.name)


def create_vxlan(device: Device, tunnel: Vxlan, *, namespace: int | None = None) -> Request:
    """Create a VXLAN device whose underlay is the socket's namespace, in the namespace of the descriptor if given.

    The outer header inherits the inner DSCP.
    """
    payload = (
        _device(device)
        + (b"" if namespace is None else codec.u32(IFLA_NET_NS_FD, namespace))
        + _link_info(
            "vxlan",
            codec.u32(IFLA_VXLAN_ID, tunnel.vni),
            codec.address(IFLA_VXLAN_LOCAL if tunnel.local.family == 4 else IFLA_VXLAN_LOCAL6, tunnel.local),
            codec.be16(IFLA_VXLAN_PORT, tunnel.port),
            codec.u8(IFLA_VXLAN_LEARNING, tunnel.learning),
            codec.u8(IFLA_VXLAN_TOS, _TOS_INHERIT),
        )
    )
    return Request(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, payload, "create vxlan", device.name)


def change_link(
    index: int,
    *,
    up: bool | None = None,
    arp: bool | None = None,
    name: str | None = None,
    mac: str | None = None,
    mtu: int | None = None,
    alias: str | None = None,
    group: int | None = None,
    master: int | None = None,
    namespace: int | None = None,
) -> Request:
    """Change the given settings and leave the others.

    `namespace` moves the device into the namespace of the descriptor, under `name` if given. `master=0` removes it from
    its bridge. `arp=False` (IFF_NOARP) stops neighbour resolution: only permanent neighbours are used.
    """
    flags = (IFF_UP if up else 0) | (IFF_NOARP if arp is False else 0)
    change = (0 if up is None else IFF_UP) | (0 if arp is None else IFF_NOARP)
    payload = (
        _HEADER.pack(codec.AF_UNSPEC, 0, index, flags, change)
        + (b"" if name is None else codec.text(IFLA_IFNAME, name))
        + (b"" if mac is None else codec.mac(IFLA_ADDRESS, mac))
        + (b"" if alias is None else codec.attribute(IFLA_IFALIAS, alias.encode()))
        + _u32_attributes({IFLA_MTU: mtu, IFLA_GROUP: group, IFLA_MASTER: master, IFLA_NET_NS_FD: namespace})
    )
    return Request(RTM_NEWLINK, 0, payload, "change link", name or index)


def add_altname(index: int, name: str) -> Request:
    """Add an alternative name of up to 127 characters; one that exists already is kept."""
    names = codec.nest(IFLA_PROP_LIST, codec.text(IFLA_ALT_IFNAME, name))
    payload = _HEADER.pack(codec.AF_UNSPEC, 0, index, 0, 0) + names
    return Request(RTM_NEWLINKPROP, NLM_F_CREATE | NLM_F_EXCL, payload, "add name", name, frozenset({errno.EEXIST}))


def change_address_settings(index: int, *, link_local: bool, v4: Mapping[int, int] | None = None) -> Request:
    """Set whether the kernel generates an IPv6 link-local address, and IPv4 settings by `IPV4_DEVCONF_*` number.

    Send it before the request that sets the device up: the kernel generates the address at that moment, and within one
    message it applies IFF_UP first.
    """
    mode = codec.nest(
        codec.AF_INET6,
        codec.u8(IFLA_INET6_ADDR_GEN_MODE, IN6_ADDR_GEN_MODE_EUI64 if link_local else IN6_ADDR_GEN_MODE_NONE),
    )
    settings = codec.nest(codec.AF_INET, codec.nest(IFLA_INET_CONF, _u32_attributes(v4))) if v4 else b""
    payload = _HEADER.pack(codec.AF_UNSPEC, 0, index, 0, 0) + codec.nest(IFLA_AF_SPEC, settings, mode)
    return Request(RTM_NEWLINK, 0, payload, "change address settings of link", index)


def change_bridge_port(index: int, flags: PortFlags) -> Request:
    """Change bridge port settings. The kernel takes them only in a message after the one that set IFLA_MASTER."""
    data = [codec.u8(number, getattr(flags, name)) for name, number in _PORT_FLAGS.items()]
    info = codec.nest(
        IFLA_LINKINFO, codec.attribute(IFLA_INFO_SLAVE_KIND, b"bridge"), codec.nest(IFLA_INFO_SLAVE_DATA, *data)
    )
    return Request(RTM_NEWLINK, 0, _HEADER.pack(codec.AF_UNSPEC, 0, index, 0, 0) + info, "change bridge port", index)


@contextmanager
def ignore_missing_device() -> Iterator[None]:
    """Ignore ENODEV: the device was deleted with its network namespace."""
    try:
        yield
    except NetlinkError as refusal:
        if refusal.errno != errno.ENODEV:
            raise


def delete_link(index: int) -> Request:
    """Delete a device; of a veth pair both ends. It waits about 20 ms for RCU: see `delete_group`."""
    return Request(RTM_DELLINK, 0, _HEADER.pack(0, 0, index, 0, 0), "delete link", index, _GONE)


def delete_group(group: int) -> Request:
    """Delete all devices of a group; the kernel waits for RCU only once."""
    payload = _HEADER.pack(0, 0, 0, 0, 0) + codec.u32(IFLA_GROUP, group)
    return Request(RTM_DELLINK, 0, payload, "delete link group", group, _GONE)


def read_links(netlink: NetlinkSocket, *, marked: str = "") -> list[Link]:
    """Read the devices of the namespace whose alias starts with `marked`."""
    payload = _HEADER.pack(0, 0, 0, 0, 0) + codec.u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
    links = map(parse_link, netlink.dump(Request(RTM_GETLINK, 0, payload, "read", "links")))
    return [link for link in links if link.alias.startswith(marked)]


def read_link(netlink: NetlinkSocket, name: str) -> Link | None:
    """Read the device of that name, or None."""
    payload = (
        _HEADER.pack(0, 0, 0, 0, 0) + codec.u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS) + codec.text(IFLA_IFNAME, name)
    )
    answer = netlink.get(Request(RTM_GETLINK, 0, payload, "read link", name, _GONE))
    return None if answer is None else parse_link(answer)


def update_carrier(netlink: NetlinkSocket, index: int) -> None:
    """Have the kernel process a pending carrier change now."""
    # RTM_GETLINK runs linkwatch for the device. Otherwise a worker does, up to a second later.
    payload = _HEADER.pack(0, 0, index, 0, 0) + codec.u32(IFLA_EXT_MASK, RTEXT_FILTER_SKIP_STATS)
    netlink.get(Request(RTM_GETLINK, 0, payload, "read link", index, _GONE))


def parse_link(payload: bytes) -> Link:
    """Decode an RTM_NEWLINK message."""
    _, _, index, flags, _ = codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    info = codec.attributes(found.get(IFLA_LINKINFO, b""))
    kind = codec.to_text(info.get(IFLA_INFO_KIND))
    return Link(
        index=index,
        name=codec.to_text(found.get(IFLA_IFNAME)),
        kind=kind,
        mac=codec.to_mac(found.get(IFLA_ADDRESS)),
        mtu=codec.to_int(found.get(IFLA_MTU)),
        up=bool(flags & IFF_UP),
        alias=codec.to_text(found.get(IFLA_IFALIAS)),
        group=codec.to_int(found.get(IFLA_GROUP)),
        master=codec.to_int(found.get(IFLA_MASTER)),
        peer=codec.to_int(found.get(IFLA_LINK)) if kind in _JOINED else 0,
        vxlan=_parse_vxlan(info.get(IFLA_INFO_DATA, b"")) if kind == "vxlan" else None,
        port=_parse_port(info.get(IFLA_INFO_SLAVE_DATA, b""))
        if codec.to_text(info.get(IFLA_INFO_SLAVE_KIND)) == "bridge"
        else None,
        # IFF_PROMISC set by the administrator counts once in IFLA_PROMISCUITY; leave it out.
        promiscuous_users=max(codec.to_int(found.get(IFLA_PROMISCUITY)) - bool(flags & IFF_PROMISC), 0),
        altnames=tuple(codec.to_text(name) for _, name in codec.attribute_list(found.get(IFLA_PROP_LIST, b""))),
    )


def _parse_vxlan(data: bytes) -> Vxlan | None:
    """Decode IFLA_VXLAN_*; None for a device without a local address, which we never create."""
    found = codec.attributes(data)
    local = found.get(IFLA_VXLAN_LOCAL) or found.get(IFLA_VXLAN_LOCAL6)
    if local is None:
        return None
    return Vxlan(
        vni=codec.to_int(found.get(IFLA_VXLAN_ID)),
        port=codec.to_int_be(found.get(IFLA_VXLAN_PORT)),
        local=codec.to_address(local),
        learning=bool(codec.to_int(found.get(IFLA_VXLAN_LEARNING))),
    )


def _parse_port(data: bytes) -> PortFlags:
    found = codec.attributes(data)
    return PortFlags(**{name: bool(codec.to_int(found.get(number))) for name, number in _PORT_FLAGS.items()})


def _device(device: Device) -> bytes:
    return (
        _HEADER.pack(codec.AF_UNSPEC, 0, device.index, 0, 0)
        + codec.text(IFLA_IFNAME, device.name)
        + (codec.mac(IFLA_ADDRESS, device.mac) if device.mac else b"")
        + (codec.u32(IFLA_MTU, device.mtu) if device.mtu else b"")
        # One queue per direction: by default there is one per CPU, creation takes half as long again, and one thread
        # of the pod's sender gains nothing from more.
        + codec.u32(IFLA_NUM_TX_QUEUES, 1)
        + codec.u32(IFLA_NUM_RX_QUEUES, 1)
    )


def _u32_attributes(values: Mapping[int, int | None]) -> bytes:
    return b"".join(codec.u32(kind, value) for kind, value in values.items() if value is not None)


def _link_info(kind: str, *data: bytes) -> bytes:
    return codec.nest(IFLA_LINKINFO, codec.attribute(IFLA_INFO_KIND, kind.encode()), codec.nest(IFLA_INFO_DATA, *data))
