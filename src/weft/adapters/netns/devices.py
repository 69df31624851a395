"""Names, MACs and addresses of the devices of a tenant netns (pure).

Both datapaths use them, and nodes rely on the same values for each other's devices on the overlay.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

from weft.domain.addresses import Address
from weft.kernel.netlink.codec import pack_mac

PORT_PREFIX: Final = "wp"
OVERLAY_PREFIX: Final = "wx"
BRIDGE_PREFIX: Final = "wb"
IFB_PREFIX: Final = "wi"
NETNS_PORT_PREFIX: Final = "wl"
HOST_LINK_PREFIX: Final = "wefth-"
# The tenant's end of its veth to the host.
TENANT_HOST_LINK: Final = "wh0"
DELETED_POD_LINK_PREFIX: Final = "wgone"
DELETED_IFB_PREFIX: Final = "wmgone"

# Shown in docs/reference/nft-tables.md.
DEVICE_NAMES: Final = {
    f"{PORT_PREFIX}…": "host end of a pod's interface: a veth, or an internal port of Open vSwitch",
    f"{OVERLAY_PREFIX}VNI": "VXLAN device of an overlay network",
    f"{BRIDGE_PREFIX}NUMBER": "bridge of a network, in bridge mode",
    TENANT_HOST_LINK: "tenant's end of the veth pair to the host",
    f"{HOST_LINK_PREFIX}HASH": "host's end of that pair, in the host netns; its alias names the tenant",
    f"{IFB_PREFIX}…": "ifb device that limits what the port of the same suffix sends",
    f"{NETNS_PORT_PREFIX}…": "internal port of Open vSwitch that leads to a tenant netns (ovs datapath only)",
    f"{DELETED_POD_LINK_PREFIX}NUMBER": "pod's end of a veth pair after DEL, renamed until the reaper deletes it",
    f"{DELETED_IFB_PREFIX}INDEX": "ifb device that is no longer used, renamed until the reaper deletes it",
}

# Link group of devices that wait for deletion. Deleting a device waits for an RCU grace period, so the reaper deletes
# the whole group with one request, off the path of DEL.
REAPED_GROUP: Final = 87

# MAC of the host end of every pod's veth pair and of every gateway: it is the same on all nodes, so a workload that
# moves keeps a valid neighbour entry.
PORT_MAC: Final = "ee:ee:ee:ee:ee:ee"
# MAC of a next hop in a tenant netns. It is a multicast MAC (I/G bit): the kernel does not forward a packet sent to one
# unless the `spoofguard` chain sets its pkttype to unicast. So if the nft table is deleted, nothing is forwarded.
HOP_MAC: Final = "ef:ee:ee:ee:ee:ee"
# MAC of the host's end of its link to a tenant.
HOST_MAC: Final = "ee:ee:ee:ee:ee:e0"

# Next hops of pods that have no gateway address, and of the host towards a tenant netns.
NODE_V4: Final = Address(4, 0xA9FE0101)  # 169.254.1.1
NODE_V6: Final = Address(6, 0xFE80 << 112 | 1)  # fe80::1
# Next hops of a tenant netns towards the host: 169.254.1.2 and fe80::2. No device has these addresses; permanent
# neighbour entries resolve them, because the link is point-to-point.
HOST_HOPS: Final = {4: Address(4, 0xA9FE0102), 6: Address(6, 0xFE80 << 112 | 2)}

# Hop limit of a packet that its source node forwarded without a policy verdict, because it does not know the
# destination's identity yet. The destination's node evaluates policy for it. No other forwarded packet has 255.
POLICY_DEFERRED_HOP_LIMIT: Final = 255

_LINK_LOCAL: Final = 0xFE80 << 112
_NEXT_HOP_PREFIX: Final = _LINK_LOCAL | 0x7766 << 32  # fe80::7766:a.b.c.d

# The MACs of VXLAN devices, as value and mask: of IPv4 VTEPs (02:77, then the address) and of IPv6 VTEPs (06, then 40
# bits of a hash of the address). No workload has such a MAC: theirs begin with 02:02.
OVERLAY_MACS: Final = (
    ("02:77:00:00:00:00", "ff:ff:00:00:00:00"),
    ("06:00:00:00:00:00", "ff:00:00:00:00:00"),
)
_HASHED_MAC: Final = 0x06 << 40


def overlay_name(vni: int) -> str:
    """Return the name of the VXLAN device of an overlay."""
    return f"{OVERLAY_PREFIX}{vni}"


def segment_name(number: int) -> str:
    """Return the name of the bridge of a segment."""
    return f"{BRIDGE_PREFIX}{number}"


def overlay_mac(vtep: Address) -> str:
    """Return the MAC of a node's VXLAN devices. It is derived from the VTEP address, so peers need no lookup."""
    # An IPv6 address does not fit. Its low 32 bits would be the same for nodes that differ in their prefixes only.
    number = 0x0277 << 32 | vtep.number if vtep.family == 4 else _HASHED_MAC | _hash(vtep, bits=40)
    return ":".join(f"{byte:02x}" for byte in number.to_bytes(6, "big"))


def overlay_hop_mac(vtep: Address) -> str:
    """Return the MAC by which peers address that node: a multicast MAC, for the same reason as `HOP_MAC`."""
    mac = overlay_mac(vtep)
    return f"{int(mac[:2], 16) | 1:02x}{mac[2:]}"


def next_hop(vtep: Address) -> Address:
    """Return the link-local address by which routes name a peer. One address serves both families (RFC 5549)."""
    if vtep.family == 4:
        return Address(6, _NEXT_HOP_PREFIX | vtep.number)
    return Address(6, _LINK_LOCAL | _hash(vtep, bits=64))


@lru_cache(maxsize=8192)
def _hash(vtep: Address, *, bits: int) -> int:
    """Return a hash that is the same on every node. 5,000 nodes collide in 40 bits once in 90,000 clusters."""
    return int.from_bytes(hashlib.sha256(vtep.number.to_bytes(16, "big")).digest(), "big") >> 256 - bits


def link_local(mac: str) -> Address:
    """Return the EUI-64 link-local address that the kernel gives to a device with this MAC (RFC 4291, appendix A)."""
    packed = pack_mac(mac)
    identifier = bytes([packed[0] ^ 2]) + packed[1:3] + b"\xff\xfe" + packed[3:]
    return Address(6, _LINK_LOCAL | int.from_bytes(identifier, "big"))
