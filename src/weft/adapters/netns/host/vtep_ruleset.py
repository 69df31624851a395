"""The nft table `inet weft_vxlan` of the host netns: which VXLAN packets the node accepts and sends (pure).

The kernel decapsulates what anybody sends to the tunnel port, at any address of the host. So this table accepts VXLAN
packets at the VTEP address only, from the VTEPs of other nodes only, and only with inner sources that the sending node
may have. Nobody but the kernel's VXLAN devices sends to the tunnel port of a node. Both datapaths use the table: their
tunnels are VXLAN devices of the kernel.

The inner source is compared with the addresses of workloads and hosts (`inner_owners`), then with blocks
(`block_owners`). One with an owner passes only from the owner's VTEP. One without is left to policy, for which it is an
unknown identity. Offsets begin at the outer UDP header: 8 bytes UDP, 8 VXLAN, 14 Ethernet.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from weft.adapters.netns.devices import HOST_LINK_PREFIX, OVERLAY_PREFIX
from weft.adapters.netns.drop_reasons import DROP_SPOOFED, DROP_UNKNOWN_VTEP, NFLOG_GROUP
from weft.adapters.netns.nft.commands import IP, replace_table, table_commands
from weft.domain.addresses import BITS, Address, parse_address
from weft.domain.desired.segments import RemoteMac, vlan_tag
from weft.domain.desired.state import Gateway, Overlay, RemoteRoute, StateItem, VxlanPeer
from weft.domain.host_access.state import HostLink, RemoteHostReturnRoute
from weft.domain.ids import TenantName
from weft.domain.ipam.allocator import BLOCK_SIZE
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.nft_set import Element, key

VTEP_TABLE: Final = "weft_vxlan"
DROP_COUNTERS: Final = "drop_counters"

CHAINS: Final = {
    "vxlan_ingress": "pick received packets to the tunnel port",
    "vxlan_decap": "accept them at the VTEP address from VTEPs of other nodes; drop all others (`weft/unknown-vtep`)",
    "vxlan_peer": "from a node's VTEP: drop what enters by an interface that does not lead there",
    "inner_source": "select the check of the inner source; drop frames that are neither IP nor ARP",
    "inner_source{4,6}": "drop a source that belongs to another node (`weft/spoofed`)",
    "inner_nd": "the same for the target of a neighbour advertisement; drop router advertisements and redirects",
    "inner_source_arp": "the same for the sender of an ARP packet",
    "vxlan_accept": "no conntrack for accepted VXLAN packets",
    "vxlan_notrack_local": "no conntrack for sent VXLAN packets",
    "vxlan_egress": "pick packets to the tunnel port that are sent with the VTEP address, or to a node",
    "vxlan_encap": "accept those of VXLAN devices; drop those of processes and NAT (`weft/unknown-vtep`)",
    "drop_reason": f"count a drop, log it to nflog group {NFLOG_GROUP}, rate-limited, and drop",
}
SETS: Final = {
    "vtep_peers": "VTEP addresses of the other nodes",
    "vni_tenants": "tenant of a VNI, as a number",
    "inner_owners{4,6}": "tenant and address of a workload or host, with the VTEP of its node",
    "inner_known{4,6}": "tenant and address, of this node too: from any other VTEP it is spoofed",
    "block_owners{4,6}": "tenant and address block, with the VTEP of its node",
    "block_known{4,6}": "tenant and address block: from any other VTEP it is spoofed",
    "gateways{4,6}": "tenant and gateway address: every node answers for it, so that none announces it to others",
    DROP_COUNTERS: "packets per drop reason",
}

_VNI, _ETHER_TYPE, _ARP_SENDER = "@th,96,24", "@th,224,16", "@th,352,32"
_INNER_SOURCES = {4: "@th,336,32", 6: "@th,304,128"}
# Fields of an inner IPv6 packet: its first header, hop limit, and, if that header is ICMPv6, type and ND target.
_NEXT_HEADER, _HOP_LIMIT, _ICMPV6_TYPE, _ND_TARGET = "@th,288,8", "@th,296,8", "@th,560,8", "@th,624,128"
_ICMPV6, _ROUTER_ADVERT, _NEIGHBOR_ADVERT, _REDIRECT = 58, 134, 136, 137
# Headers that may come before ICMPv6: hop-by-hop options, routing, destination options.
_EXTENSIONS = 0, 43, 60
_ETHER_TYPES = {4: 0x0800, 6: 0x86DD}
_ETH_P_ARP = 0x0806
_BLOCK_BITS = BLOCK_SIZE.bit_length() - 1
_REASONS = (DROP_SPOOFED, DROP_UNKNOWN_VTEP)


class VtepConfig(NamedTuple):
    """The local end of the tunnels."""

    vtep: Address
    port: int


class VtepEntry(NamedTuple):
    """An element, and the set or map of the table it is in."""

    name: str
    element: Element


# All sets and maps whose elements follow from state items.
ENTRY_SETS: Final = (
    "vtep_peers",
    "vni_tenants",
    *(
        f"{name}{family}"
        for name in ("inner_owners", "inner_known", "block_owners", "block_known", "gateways")
        for family in (4, 6)
    ),
)


def tenant_number(tenant: TenantName) -> int:
    """Return the number of a tenant in keys: a hash, so that it is the same after every restart."""
    # Two tenants with one number would drop each other's packets where they use the same addresses on different nodes:
    # one pair among a thousand tenants in 8,000 clusters.
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:4], "big") or 1


def declare_commands(config: VtepConfig) -> str:
    """Return commands that create the table and its sets. Without chains it affects no packet."""
    return table_commands(f"inet {VTEP_TABLE}", declarations=_declarations(config), chains={}) + (
        f"add element inet {VTEP_TABLE} {DROP_COUNTERS} {{ {', '.join(f'{number:#x}' for number in _REASONS)} }}\n"
    )


def redeclare_commands(config: VtepConfig) -> str:
    """Return the same for something incompatible in its place, such as sets of another address family."""
    return replace_table(f"inet {VTEP_TABLE}", declare_commands(config))


def chain_commands(config: VtepConfig, *, receiving: bool = True) -> str:
    """Return commands that create or replace all chains in one transaction. Elements and counters stay.

    `receiving`: the node has an overlay. Without one, other programs may use the port for tunnels of their own.
    """
    chains = _chains(config)
    if not receiving:
        del chains["vxlan_ingress"][1:]
    return table_commands(f"inet {VTEP_TABLE}", declarations=(), chains=chains)


def _declarations(config: VtepConfig) -> Iterator[str]:
    vtep = f"{IP[config.vtep.family]} saddr"
    yield f"set vtep_peers {{ typeof {vtep}; }}"
    yield f"map vni_tenants {{ typeof {_VNI} : meta priority; }}"
    for family, source in _INNER_SOURCES.items():
        for name in ("inner", "block"):
            yield f"set {name}_owners{family} {{ typeof meta priority . {source} . {vtep}; }}"
            yield f"set {name}_known{family} {{ typeof meta priority . {source}; }}"
        yield f"set gateways{family} {{ typeof meta priority . {source}; }}"
    yield f"set {DROP_COUNTERS} {{ type mark; counter; }}"


def _drop(reason: int) -> str:
    return f"meta mark set {reason:#x} goto drop_reason"


def _chains(config: VtepConfig) -> dict[str, list[str]]:
    ip, own = IP[config.vtep.family], config.vtep
    tunnel_port, peers = f"udp dport {config.port}", "@vtep_peers"
    return {
        # All other packets pay for this one rule.
        "vxlan_ingress": [
            "type filter hook prerouting priority raw; policy accept;",
            f"{tunnel_port} goto vxlan_decap",
        ],
        "vxlan_decap": [
            # After masquerading, a workload's packet to the tunnel port would look like one of this node's tunnels.
            f'iifname "{HOST_LINK_PREFIX}*" {_drop(DROP_UNKNOWN_VTEP)}',
            f'iifname "lo" {_drop(DROP_UNKNOWN_VTEP)}',
            f"{ip} daddr {own} {ip} saddr {peers} goto vxlan_peer",
            f"fib daddr type local {_drop(DROP_UNKNOWN_VTEP)}",
            # Forwarded, with the address of one node to another: only from where that node is.
            f"{ip} daddr {peers} {ip} saddr {peers} fib saddr . iif oif missing {_drop(DROP_UNKNOWN_VTEP)}",
        ],
        # A container network on this host can send with any source, and so can its neighbours on the wire of the VTEP.
        # The former enters by an interface that neither has the VTEP address nor leads to the node.
        "vxlan_peer": [
            "fib daddr . iif type local goto inner_source",
            "fib saddr . iif oif exists goto inner_source",
            _drop(DROP_UNKNOWN_VTEP),
        ],
        "inner_source": [
            f"meta priority set {_VNI} map @vni_tenants",
            *(f"{_ETHER_TYPE} {number:#x} goto inner_source{family}" for family, number in _ETHER_TYPES.items()),
            f"{_ETHER_TYPE} {_ETH_P_ARP:#x} goto inner_source_arp",
            # Also frames with an inner VLAN tag, behind which a source would be hidden.
            _drop(DROP_SPOOFED),
        ],
        "inner_source4": _source_checks(_INNER_SOURCES[4], 4, ip),
        # A host ignores ND with any other hop limit: a router has decremented it (RFC 4861, 7.1).
        "inner_source6": [f"{_HOP_LIMIT} 255 jump inner_nd", *_source_checks(_INNER_SOURCES[6], 6, ip)],
        "inner_nd": _nd_checks(ip),
        "inner_source_arp": [
            f"meta priority . {_ARP_SENDER} @gateways4 {_drop(DROP_SPOOFED)}",
            *_source_checks(_ARP_SENDER, 4, ip),
        ],
        # The priority must not classify the inner packet in a qdisc. Conntrack entries of tunnels would have no use.
        "vxlan_accept": ["meta priority set none notrack accept"],
        "vxlan_notrack_local": [
            "type filter hook output priority raw; policy accept;",
            f"{ip} saddr {own} {tunnel_port} notrack",
        ],
        # After SNAT, which would give any forwarded packet the address of this node.
        "vxlan_egress": [
            "type filter hook postrouting priority srcnat + 10; policy accept;",
            f"{tunnel_port} {ip} saddr {own} goto vxlan_encap",
            f"{tunnel_port} {ip} daddr {peers} goto vxlan_encap",
        ],
        "vxlan_encap": [
            # In this hook the input interface of an encapsulated packet is its VXLAN device.
            f'iifname "{OVERLAY_PREFIX}*" accept',
            # A process has sent it.
            f"meta skuid 0-4294967294 {_drop(DROP_UNKNOWN_VTEP)}",
            f"{ip} daddr {peers} {ip} saddr != {peers} {_drop(DROP_UNKNOWN_VTEP)}",
            # Tunnels of other programs to machines that are no nodes.
            'meta iifkind "vxlan" accept',
            # Forwarded, and with the address of this node: by NAT. Bridged packets have no input interface here.
            f"meta iif != 0 {ip} saddr {own} {_drop(DROP_UNKNOWN_VTEP)}",
        ],
        "drop_reason": [
            f"meta mark @{DROP_COUNTERS}",
            f"limit rate 200/second burst 400 packets log group {NFLOG_GROUP} snaplen 128",
            "drop",
        ],
    }


def _source_checks(source: str, family: int, ip: str) -> list[str]:
    """Compare the node that sent a packet with the one that has its inner source: by address, then by block."""
    mask = (1 << BITS[family]) - (1 << _BLOCK_BITS)
    rules = []
    for name, field in (("inner", source), ("block", f"{source} & {mask:#x}")):
        rules += [
            f"meta priority . {field} . {ip} saddr @{name}_owners{family} goto vxlan_accept",
            f"meta priority . {field} @{name}_known{family} {_drop(DROP_SPOOFED)}",
        ]
    return [*rules, "goto vxlan_accept"]


def _nd_checks(ip: str) -> list[str]:
    """Compare the node that sent a neighbour advertisement with the one that has the address it is about."""
    advert = f"{_ICMPV6_TYPE} {_NEIGHBOR_ADVERT} meta priority . {_ND_TARGET}"
    return [
        # Behind another header a message would be hidden. Hosts ignore it in a fragment (RFC 6980).
        *(f"{_NEXT_HEADER} {number} {_drop(DROP_SPOOFED)}" for number in _EXTENSIONS),
        f"{_NEXT_HEADER} != {_ICMPV6} return",
        # The gateway is on the node of the workload: it needs no routers behind tunnels.
        *(f"{_ICMPV6_TYPE} {number} {_drop(DROP_SPOOFED)}" for number in (_ROUTER_ADVERT, _REDIRECT)),
        f"{advert} @gateways6 {_drop(DROP_SPOOFED)}",
        f"{advert} . {ip} saddr @inner_owners6 return",
        f"{advert} @inner_known6 {_drop(DROP_SPOOFED)}",
    ]


def entries_of(item: StateItem, config: VtepConfig) -> Iterator[VtepEntry]:
    """Yield the entries of a state item. Several items may have one in common."""
    if build := _BUILDERS.get(type(item)):
        yield from build(item, config)


def _overlay(item: Overlay, config: VtepConfig) -> Iterator[VtepEntry]:  # noqa: ARG001 (one signature for all)
    yield VtepEntry("vni_tenants", Element(key=item.vni.to_bytes(3, "big"), value=_tenant(item.tenant)))


def _vxlan_peer(item: VxlanPeer, config: VtepConfig) -> Iterator[VtepEntry]:
    vtep = parse_address(item.vtep, field="vtep")
    # No tunnel leads to the other address family.
    if vtep.family == config.vtep.family:
        yield VtepEntry("vtep_peers", Element(key=pack_address(vtep)))


def _remote_route(item: RemoteRoute, config: VtepConfig) -> Iterator[VtepEntry]:
    prefix = item.prefix
    name = {BITS[prefix.family]: "inner", BITS[prefix.family] - _BLOCK_BITS: "block"}.get(prefix.length)
    if name and not vlan_tag(item.vni):
        yield from _owned(name, item.tenant, Address(prefix.family, prefix.base), vtep=item.vtep, config=config)


def _remote_mac(item: RemoteMac, config: VtepConfig) -> Iterator[VtepEntry]:
    for address in () if vlan_tag(item.vni) else item.addresses:
        yield from _owned("inner", item.tenant, address, vtep=item.vtep, config=config)


def _remote_host(item: RemoteHostReturnRoute, config: VtepConfig) -> Iterator[VtepEntry]:
    if not vlan_tag(item.vni):
        yield from _owned("inner", item.tenant, item.address, vtep=item.vtep, config=config)


def _gateway(item: Gateway, config: VtepConfig) -> Iterator[VtepEntry]:  # noqa: ARG001
    # Its packets pass: an ICMP error of another node's gateway has this source.
    element = Element(key=key(_tenant(item.tenant), pack_address(item.address)))
    yield VtepEntry(f"gateways{item.address.family}", element)


def _own_host(item: HostLink, config: VtepConfig) -> Iterator[VtepEntry]:  # noqa: ARG001
    for address in item.addresses:
        yield _known("inner", item.tenant, address)


def _owned(name: str, tenant: TenantName, address: Address, *, vtep: str, config: VtepConfig) -> Iterator[VtepEntry]:
    outer = parse_address(vtep, field="vtep")
    yield _known(name, tenant, address)
    if outer.family == config.vtep.family:
        element = Element(key=key(_tenant(tenant), pack_address(address), pack_address(outer)))
        yield VtepEntry(f"{name}_owners{address.family}", element)


def _known(name: str, tenant: TenantName, address: Address) -> VtepEntry:
    return VtepEntry(f"{name}_known{address.family}", Element(key=key(_tenant(tenant), pack_address(address))))


def _tenant(tenant: TenantName) -> bytes:
    # `meta priority` is in host byte order.
    return tenant_number(tenant).to_bytes(4, sys.byteorder)


_BUILDERS: Final[dict[type, Callable[[Any, VtepConfig], Iterator[VtepEntry]]]] = {
    Overlay: _overlay,
    VxlanPeer: _vxlan_peer,
    RemoteRoute: _remote_route,
    RemoteMac: _remote_mac,
    RemoteHostReturnRoute: _remote_host,
    HostLink: _own_host,
    Gateway: _gateway,
}
