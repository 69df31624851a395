"""Filtering of bridged traffic as nft chains (docs/design/bridge.md has the diagram).

A frame passes two tables. The bridge table knows ports and MACs but no connections: it applies anti-spoofing and marks
the packet with the kinds of ports it passes between. Then br_netfilter shows the packet to the tenant's inet table,
where it is evaluated as any other; there it seems to enter and leave through the bridge. A packet that still has the
mark afterwards was not evaluated and is dropped. So policy holds even if somebody turns br_netfilter off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from weft.adapters.netns.devices import OVERLAY_MACS, OVERLAY_PREFIX, PORT_PREFIX
from weft.adapters.netns.drop_reasons import DROP_CROSS_NETWORK, DROP_ENDPOINT_NOT_READY, DROP_ROGUE_RA, DROP_SPOOFED
from weft.adapters.netns.nft.commands import IP, replace_table, table_commands
from weft.adapters.netns.nft.entries import BRIDGE_TABLE
from weft.adapters.netns.nft.policy_chains import BRIDGED, IDENTITY_LOOKUPS, drop_with_reason
from weft.domain.policy.policymap.policy_state import UNKNOWN_IDENTITY, WORKLOAD

SAME_BRIDGE: Final = "same_bridge"
BRIDGE_SYSCTLS: Final = {
    "net/bridge/bridge-nf-call-iptables": "1",
    "net/bridge/bridge-nf-call-ip6tables": "1",
    "net/bridge/bridge-nf-filter-vlan-tagged": "0",
    "net/bridge/bridge-nf-filter-pppoe-tagged": "0",
}

# In the inet table.
CHAINS: Final = {
    "bridge_policy": "checks for packets between bridges or on one, before policy is evaluated",
    "bridge_local": "between two local ports: both need a ready workload",
    "bridge_src_ready": "drop unless the sender is a ready workload (`weft/endpoint-not-ready`)",
    "bridge_dst_ready": "drop unless the receiver is a ready workload (`weft/endpoint-not-ready`)",
    "bridge_from_overlay": "from the overlay to a local port: look for unknown identities",
    "bridge_sender_src": "look up the sender, which is the connection's source; an unknown one has ingress rules only",
    "bridge_sender_dst": "look up the sender, which is the connection's destination; allow an unknown identity",
}
SETS: Final = {
    SAME_BRIDGE: "each bridge paired with itself: packets that are routed back to the bridge they came from",
}
# In the bridge table.
BRIDGE_CHAINS: Final = {
    "spoofguard": "accept a port's frames only with its own MAC and addresses; drop all that is not IP or ARP",
    "overlay_ingress": "frames from the VXLAN device: drop RA, redirects and sources of this node",
    "arp_spoofguard": "accept ARP only with the port's own MAC and address as sender",
    "nd_spoofguard": "accept neighbour discovery only about the port's own addresses",
    "ns_to_owner": "send a neighbour solicitation to the MAC that owns the target, if it is local",
    "mark_spoofed": "mark for `drop_spoofed` of the inet table, which counts and logs the drop",
    "bridge_forward": "drop broadcast and multicast except ARP and solicitations, and frames to the MACs of nodes",
    "intra_bridge": "mark the packet with the kinds of its two ports until policy is evaluated",
    "bridge_final": "drop what still has the mark: policy was not evaluated",
}
BRIDGE_SETS_PURPOSES: Final = {
    "l2_spoofguard{4,6}": "interface, MAC and address combinations that may send, in bridge mode; v6 with link-local",
    "nd_owners": "interface, MAC and v6 address combinations that neighbour advertisements may claim",
    "ns_target_mac": "MAC of the local workload that owns a solicited v6 address",
    "local_ips{4,6}": "addresses of local workloads: no frame from the overlay has one as its source",
}

# Mark bits of a packet between ports of a bridge, beside `BRIDGED`, until policy is evaluated.
_FROM_PORT, _TO_PORT = 0x02000000, 0x04000000
# The I/G bit of a MAC: broadcast or multicast.
_GROUP_BIT = "01:00:00:00:00:00"

_DECLARATIONS = (
    "set l2_spoofguard4 { type ifname . ether_addr . ipv4_addr; }",
    "set l2_spoofguard6 { type ifname . ether_addr . ipv6_addr; }",
    # nft has no name for the target of neighbour discovery: 16 bytes from the 8th of the ICMPv6 message on.
    "set nd_owners { typeof iifname . ether saddr . @th,64,128; }",
    "map ns_target_mac { typeof @th,64,128 : ether saddr; }",
    "set local_ips4 { type ipv4_addr; }",
    "set local_ips6 { typeof @th,64,128; }",
)
_CHAINS = {
    "spoofguard": [
        "type filter hook prerouting priority -310; policy drop;",
        "iifname . ether saddr . ip saddr @l2_spoofguard4 accept",
        f'iifname "{OVERLAY_PREFIX}*" goto overlay_ingress',
        "ether type arp goto arp_spoofguard",
        "meta l4proto ipv6-icmp jump nd_spoofguard",
        # Link-local addresses serve for neighbour discovery only.
        "ip6 saddr fe80::/10 goto mark_spoofed",
        "iifname . ether saddr . ip6 saddr @l2_spoofguard6 accept",
        "ether type { ip, ip6 } goto mark_spoofed",
    ],
    "overlay_ingress": [
        # Another node that sends as a workload of this one. `inet weft_vxlan` of the host checks all other sources.
        "ip saddr @local_ips4 goto mark_spoofed",
        "arp saddr ip @local_ips4 drop",
        "meta protocol ip6 @nh,64,128 @local_ips6 goto mark_spoofed",
        "icmpv6 type nd-neighbor-advert @th,64,128 @local_ips6 drop",
        "icmpv6 type { nd-router-advert, nd-redirect } drop",
        "icmpv6 type nd-neighbor-solicit ether daddr set @th,64,128 map @ns_target_mac",
        "ether type { ip, ip6, arp } accept",
        "drop",
    ],
    "arp_spoofguard": [
        "iifname . ether saddr . arp saddr ip != @l2_spoofguard4 drop",
        "iifname . arp saddr ether . arp saddr ip @l2_spoofguard4 accept",
        "drop",
    ],
    "nd_spoofguard": [
        f"icmpv6 type {{ nd-router-advert, nd-redirect }} meta mark set {DROP_ROGUE_RA:#x} accept",
        "icmpv6 type != { nd-neighbor-solicit, nd-neighbor-advert } return",
        "iifname . ether saddr . ip6 saddr != @l2_spoofguard6 drop",
        "icmpv6 type nd-neighbor-solicit goto ns_to_owner",
        "iifname . ether saddr . @th,64,128 @nd_owners accept",
        "drop",
    ],
    # Without an entry the destination stays multicast, and the bridge answers from its neighbour table.
    "ns_to_owner": ["ether daddr set @th,64,128 map @ns_target_mac", "accept"],
    "mark_spoofed": [f"meta mark set {DROP_SPOOFED:#x} accept"],
    "bridge_forward": [
        "type filter hook forward priority -200; policy drop;",
        "ether type arp accept",
        f"ether daddr & {_GROUP_BIT} == {_GROUP_BIT} icmpv6 type nd-neighbor-solicit goto intra_bridge",
        f"ether daddr & {_GROUP_BIT} == {_GROUP_BIT} drop",
        # The MACs of VXLAN devices: only nodes send to them.
        *(f'iifname "{PORT_PREFIX}*" ether daddr & {mask} == {mac} drop' for mac, mask in OVERLAY_MACS),
        "goto intra_bridge",
    ],
    "intra_bridge": [
        f'iifname "{source}*" oifname "{destination}*" meta mark set {BRIDGED | bits:#x} accept'
        for source, destination, bits in (
            (PORT_PREFIX, PORT_PREFIX, _FROM_PORT | _TO_PORT),
            (PORT_PREFIX, OVERLAY_PREFIX, _FROM_PORT),
            (OVERLAY_PREFIX, PORT_PREFIX, _TO_PORT),
        )
    ],
    # After priority 0, at which br_netfilter runs the inet forward hooks. `policy_final` clears the mark there.
    "bridge_final": [
        "type filter hook forward priority 10; policy accept;",
        "meta mark != 0 drop",
    ],
}


def declarations() -> Iterator[str]:
    """Declare the set that these chains need in the inet table."""
    yield f"set {SAME_BRIDGE} {{ type ifname . ifname; }}"


def chains() -> dict[str, list[str]]:
    """Return the rules of the inet table for packets on a bridge or routed between two, by chain."""
    return {
        "bridge_policy": [
            f"meta mark vmap {{ {BRIDGED | _FROM_PORT | _TO_PORT:#x} : goto bridge_local, "
            f"{BRIDGED | _FROM_PORT:#x} : goto bridge_src_ready, {BRIDGED | _TO_PORT:#x} : goto bridge_from_overlay }}",
            # A workload with an outdated neighbour entry sends to the gateway what is on its own network.
            f"iifname . oifname @{SAME_BRIDGE} return",
            # Only services cross networks. The nodes of their backends see replies only.
            "ct direction reply return",
            "ct status dnat return",
            drop_with_reason(DROP_CROSS_NETWORK),
        ],
        "bridge_local": ["jump bridge_src_ready", "goto bridge_dst_ready"],
        "bridge_src_ready": _require_workload("saddr"),
        "bridge_dst_ready": _require_workload("daddr"),
        "bridge_from_overlay": [
            "jump bridge_dst_ready",
            "ct direction reply goto bridge_sender_dst",
            "goto bridge_sender_src",
        ],
        # `bridge_dst_ready` has loaded the identity of the destination.
        "bridge_sender_src": _divert_unknown("src", "unknown_src_ingress"),
        "bridge_sender_dst": _divert_unknown("dst", "policy_allow"),
    }


def _require_workload(address: str) -> list[str]:
    return [
        "meta priority set 0",
        *(f"meta priority set {ip} {address} map @ip_identity_dst{family}" for family, ip in IP.items()),
        f"meta priority & {WORKLOAD:#x} == 0 {drop_with_reason(DROP_ENDPOINT_NOT_READY)}",
    ]


def _divert_unknown(end: str, chain: str) -> list[str]:
    """Look up the sender's identity as `policy_chains` does. There is no goto: the most specific lookup comes last."""
    register, address = IDENTITY_LOOKUPS[end]
    return [
        f"{register} set 0",
        *(f"meta nfproto ipv{family} jump cidr_identity_{end}{family}" for family in IP),
        *(
            f"{register} set {address.format(ip=ip)} map @{name}_{end}{family}"
            for name in ("cidr_host_identity", "ip_identity")
            for family, ip in IP.items()
        ),
        f"{register} & {UNKNOWN_IDENTITY:#x} != 0 goto {chain}",
    ]


# The commands that create or update the bridge table. Sets and maps stay.
BRIDGE_BASE: Final = table_commands(f"bridge {BRIDGE_TABLE}", declarations=_DECLARATIONS, chains=_CHAINS)
BRIDGE_REBUILD: Final = replace_table(f"bridge {BRIDGE_TABLE}", BRIDGE_BASE)
