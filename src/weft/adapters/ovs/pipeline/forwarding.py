"""Flows for SpoofGuard, ARP/ND responders and L3 forwarding in routing mode (pure).

`l2` adds what bridge mode needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from weft.adapters.netns.devices import PORT_MAC, overlay_hop_mac, overlay_mac, overlay_name
from weft.adapters.netns.drop_reasons import DROP_INVALID, DROP_ROGUE_RA, DROP_SPOOFED
from weft.adapters.ovs.openflow.actions import (
    Action,
    Ct,
    DecrementTtl,
    Move,
    Output,
    OutputRegister,
    PopVlan,
    PushVlan,
    Resubmit,
    SetField,
)
from weft.adapters.ovs.openflow.constants import OFPP_IN_PORT
from weft.adapters.ovs.openflow.fields import ANY_FRAGMENT, match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    CS_INVALID,
    CS_NEW,
    CS_TRACKED,
    ETH_P_ARP,
    ETH_P_IPV6,
    ETHER_TYPES,
    Conditions,
    FlowContext,
    address_condition,
    drop_with_reason,
    host_prefix,
    mac_to_int,
)
from weft.adapters.ovs.pipeline.tables import (
    CT_MARK,
    FROM_OUTSIDE,
    LOCAL_WORKLOAD,
    OUTPUT_PORT,
    PKT_DESTINATION,
    PKT_SOURCE,
    REMOTE_NODE,
    SCRATCH,
    SEGMENT,
    TENANT,
    UPLINK,
    Table,
)
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.segments import vlan_tag
from weft.domain.desired.state import Gateway, Overlay, Port, Prefix, RemoteRoute, TenantNetns, VlanTrunk

_ICMP, ICMPV6 = 1, 58
# ICMPv6 types (RFC 4861).
ND_NEIGHBOR_SOLICIT, ND_NEIGHBOR_ADVERT, _ND_ROUTER_ADVERT, _ND_REDIRECT = 135, 136, 134, 137
# By family: match field, echo request type, echo reply type, IP protocol.
_ICMP_ECHO = {4: ("icmp_type", 8, 0, _ICMP), 6: ("icmpv6_type", 128, 129, ICMPV6)}
_DEFAULT_TTL = 64
# OFPVID_PRESENT: matches a frame with any VLAN tag.
_ANY_TAG = 0x1000, 0x1000
_LINK_LOCAL = (0xFE80 << 112, 0xFFC0 << 112)
# Flags R, S and O of a neighbour advertisement (RFC 4861, 4.4). Only the gateway is a router.
_ND_FLAGS_ROUTER, _ND_FLAGS_HOST = 0xE0000000, 0x60000000
# Type of the target link-layer address option of ND.
_ND_OPT_TLL = 2
_SRC = {4: "ip_src", 6: "ipv6_src"}
_DST = {4: "ip_dst", 6: "ipv6_dst"}

# Priorities in `CLASSIFIER`.
_ROGUE_RA, UPLINK_FRAME, _TAGGED, _DAD, ARP_ND, SPOOFGUARD, _LINK_LOCAL_ND, _SPOOFED = 90, 80, 70, 50, 40, 30, 20, 10
# Priorities in `L3_FORWARDING`. Below them a remote prefix has its length as priority: the longest prefix wins.
_CT_INVALID, _SPOOFED_SOURCE, GATEWAY, LOCAL = 1000, 920, 900, 800

PORT_MAC_INT = mac_to_int(PORT_MAC)


def base_flows() -> Iterator[Flow]:
    """Flows that do not depend on desired state."""
    # Workloads must not send VLAN tags: a tag selects the network of a frame from the uplinks.
    yield Flow(Table.CLASSIFIER, _TAGGED, match({"vlan_vid": _ANY_TAG}))
    for icmp_type in (_ND_ROUTER_ADVERT, _ND_REDIRECT):
        rogue: Conditions = {"eth_type": ETH_P_IPV6, "ip_proto": ICMPV6, "icmpv6_type": icmp_type}
        yield Flow(Table.CLASSIFIER, _ROGUE_RA, match(rogue), drop_with_reason(DROP_ROGUE_RA))
    for source in (0, _LINK_LOCAL):
        # Every kernel sends MLD reports and router solicitations on a new link. Drop them without a drop event.
        link_local_icmpv6: Conditions = {"eth_type": ETH_P_IPV6, "ip_proto": ICMPV6, "ipv6_src": source}
        yield Flow(Table.CLASSIFIER, _LINK_LOCAL_ND, match(link_local_icmpv6))
    yield from _nd_advertisement_flows()
    for ether_type in ETHER_TYPES.values():
        yield from _conntrack_flows(ether_type)
    yield Flow(Table.OUTPUT, 1, match({"ct_state": (0, CS_INVALID)}), (OutputRegister(OUTPUT_PORT),))


def _nd_advertisement_flows() -> Iterator[Flow]:
    advertisement: Conditions = {
        "eth_type": ETH_P_IPV6,
        "ip_proto": ICMPV6,
        "icmpv6_type": ND_NEIGHBOR_ADVERT,
        "icmpv6_code": 0,
    }
    for priority, sender, flags in ((2, {"eth_src": PORT_MAC_INT}, _ND_FLAGS_ROUTER), (1, {}, _ND_FLAGS_HOST)):
        yield Flow(
            Table.ND_RESPONDER,
            priority,
            match({**advertisement, **sender}),
            (
                SetField("nd_options_type", _ND_OPT_TLL),
                Move("eth_src", "nd_tll"),
                SetField("nd_reserved", flags),
                Output(OFPP_IN_PORT),
            ),
        )


def _conntrack_flows(ether_type: int) -> Iterator[Flow]:
    yield Flow(Table.CONNTRACK_ZONE, 1, match({"eth_type": ether_type}), (Ct(TENANT, Table.L3_FORWARDING),))
    # The userspace conntrack releases fragments that time out in reassembly with the packets of any other flow, with
    # the registers of that flow. Drop them: nothing in them can be trusted.
    timed_out: Conditions = {"eth_type": ether_type, "ip_frag": ANY_FRAGMENT, "ct_state": (CS_INVALID, CS_INVALID)}
    yield Flow(Table.L3_FORWARDING, _CT_INVALID + 1, match(timed_out))
    new: Conditions = {"eth_type": ether_type, "ct_state": (CS_NEW | CS_TRACKED, CS_NEW | CS_TRACKED)}
    fragment: Conditions = {"eth_type": ether_type, "ip_frag": ANY_FRAGMENT}
    commit = Ct(TENANT, Table.OUTPUT, commit=True, mark=CT_MARK)
    yield Flow(Table.CONNTRACK_COMMIT, 4, match({**new, **fragment}), (commit,))
    # Output before commit, else fragments that timed out might leave with the packet. No reply can arrive before the
    # commit, because the same thread of ovs-vswitchd does both.
    output_then_commit = OutputRegister(OUTPUT_PORT), Ct(TENANT, commit=True, mark=CT_MARK)
    yield Flow(Table.CONNTRACK_COMMIT, 3, match(new), output_then_commit)
    yield Flow(Table.CONNTRACK_COMMIT, 2, match(fragment), (Ct(TENANT, Table.OUTPUT),))
    yield Flow(Table.CONNTRACK_COMMIT, 1, match({"eth_type": ether_type}), (OutputRegister(OUTPUT_PORT),))


def tenant_flows(item: TenantNetns, context: FlowContext) -> Iterator[Flow]:
    """Drop packets of the tenant that conntrack found invalid."""
    conditions: Conditions = {TENANT: context.tenants[item.tenant], "ct_state": (CS_INVALID, CS_INVALID)}
    yield Flow(Table.L3_FORWARDING, _CT_INVALID, match(conditions), drop_with_reason(DROP_INVALID))


def gateway_flows(item: Gateway, context: FlowContext) -> Iterator[Flow]:
    """Answer ARP and ND for the gateway, and echo requests of workloads to it."""
    scope, address = segment_scope(context.tenants[item.tenant], item.segment), item.address
    yield arp_nd_responder(scope, host_prefix(address), priority=GATEWAY)
    field, request, reply, protocol = _ICMP_ECHO[address.family]
    echo_request = {**scope, PKT_SOURCE: LOCAL_WORKLOAD, **to_prefix(host_prefix(address)), "ip_proto": protocol}
    yield Flow(
        Table.L3_FORWARDING,
        GATEWAY,
        match({**echo_request, field: request}),
        (
            *_reply_to_sender(PORT_MAC_INT),
            Move(_SRC[address.family], _DST[address.family]),
            SetField(_SRC[address.family], address.number),
            SetField(field, reply),
            SetField("nw_ttl", _DEFAULT_TTL),
            Output(OFPP_IN_PORT),
        ),
    )


def overlay_flows(item: Overlay, context: FlowContext) -> Iterator[Flow]:
    """Classify packets that other nodes send to this node over the tunnel of a network."""
    if port := context.ports.get(overlay_name(item.vni)):
        hop = mac_to_int(overlay_hop_mac(context.vtep))
        for ether_type in ETHER_TYPES.values():
            yield Flow(
                Table.CLASSIFIER,
                SPOOFGUARD,
                match({"in_port": port, "eth_dst": hop, "eth_type": ether_type}),
                (SetField(TENANT, context.tenants[item.tenant]), SetField(PKT_SOURCE, REMOTE_NODE)),
                Table.CONNTRACK_ZONE,
            )


def trunk_flows(item: VlanTrunk, context: FlowContext) -> Iterator[Flow]:
    """Classify packets that other nodes send to this node through the uplinks: the VLAN tag selects the tenant."""
    if context.trunk:
        actions = PopVlan(), *classify(context.tenants[item.tenant], 0, kind=UPLINK)
        to_node = {**from_uplink(item.number, context), "eth_dst": mac_to_int(overlay_mac(context.vtep))}
        for ether_type in ETHER_TYPES.values():
            conditions = {**to_node, "eth_type": ether_type}
            yield Flow(Table.CLASSIFIER, UPLINK_FRAME + 1, match(conditions), actions, Table.CONNTRACK_ZONE)


def from_uplink(number: int, context: FlowContext) -> Conditions:
    """Match frames from the uplinks with the VLAN tag of a network."""
    return {"in_port": context.trunk, "vlan_vid": _ANY_TAG[0] | vlan_tag(number)}


def remote_flows(item: RemoteRoute, context: FlowContext) -> Iterator[Flow]:
    """Route a prefix to another node."""
    tenant = context.tenants[item.tenant]
    # A default route has length 0, and priority 0 is what forwards to the tenant netns.
    priority = item.prefix.length + 1
    yield arp_nd_responder({TENANT: tenant}, item.prefix, priority=priority)
    if path := path_to_nodes(item.vni, context):
        conditions = {TENANT: tenant, **to_prefix(item.prefix)}
        actions = forward_to_node(item.vtep, path, context)
        yield Flow(Table.L3_FORWARDING, priority, match(conditions), actions, Table.L4_KEY)


class OutputPath(NamedTuple):
    """How frames of a network leave the node. `kind` is the value for `pkt_destination`, `encap` pushes a VLAN tag."""

    port: int
    encap: tuple[Action, ...]
    kind: int


def path_to_nodes(number: int, context: FlowContext) -> OutputPath | None:
    """The path to other nodes for the network with an `encap_id`; None without an overlay device or uplink."""
    if tag := vlan_tag(number):
        encap = PushVlan(), SetField("vlan_vid", _ANY_TAG[0] | tag)
        return OutputPath(context.trunk, encap, UPLINK) if context.trunk else None
    port = context.ports.get(overlay_name(number))
    return OutputPath(port, (), REMOTE_NODE) if port else None


def forward_to_node(
    vtep: str, path: OutputPath, context: FlowContext, *, on_segment: bool = False
) -> tuple[Action, ...]:
    """Forward to the node with a VTEP address."""
    peer = parse_address(vtep, field="vtep")
    # The hop MAC is a multicast MAC: switches between uplinks, and bridges on a segment, would flood it.
    hop = overlay_mac(peer) if on_segment or path.kind == UPLINK else overlay_hop_mac(peer)
    source, target = mac_to_int(overlay_mac(context.vtep)), mac_to_int(hop)
    return *l3_forward(source=source, target=target, port=path.port, kind=path.kind), *path.encap


def port_flows(item: Port, context: FlowContext) -> Iterator[Flow]:
    """Install anti-spoofing entries of a workload port, and in routing mode its ARP/ND responder and host route."""
    port = context.ports.get(item.interface)
    if not port:
        return
    tenant, mac = context.tenants[item.tenant], mac_to_int(item.mac)
    classified = classify(tenant, item.segment, kind=LOCAL_WORKLOAD)
    own_mac: Conditions = {"in_port": port, "eth_src": mac}
    spoofed = SetField(TENANT, tenant), *drop_with_reason(DROP_SPOOFED)
    yield Flow(Table.CLASSIFIER, _SPOOFED, match({"in_port": port}), spoofed)
    for address in item.addresses:
        from_address = {**own_mac, **_from_address(address)}
        yield Flow(Table.CLASSIFIER, SPOOFGUARD, match(from_address), classified, Table.CONNTRACK_ZONE)
        request = {**own_mac, **arp_nd_request(address, mac)}
        yield Flow(Table.CLASSIFIER, ARP_ND, match(request), classified, Table.ARP_RESPONDER)
        # Duplicate address detection: an answer would make the workload give up its own address.
        probe = {**request, **arp_nd_target(host_prefix(address))}
        yield Flow(Table.CLASSIFIER, _DAD, match(probe))
        # Another node, or a machine behind the uplinks, that sends as this workload.
        impostor = {TENANT: tenant, PKT_SOURCE: FROM_OUTSIDE, **_from_address(address)}
        yield Flow(Table.L3_FORWARDING, _SPOOFED_SOURCE, match(impostor), drop_with_reason(DROP_SPOOFED))
        if not item.segment:
            yield arp_nd_responder({TENANT: tenant}, host_prefix(address), priority=LOCAL)
            yield Flow(
                Table.L3_FORWARDING,
                LOCAL,
                match({TENANT: tenant, **to_prefix(host_prefix(address))}),
                l3_forward(source=PORT_MAC_INT, target=mac, port=port, kind=LOCAL_WORKLOAD),
                Table.L4_KEY,
            )


def _from_address(address: Address) -> Conditions:
    return address_condition(address.family, v4="ip_src", v6="ipv6_src", prefix=host_prefix(address))


def segment_scope(tenant: int, segment: int) -> Conditions:
    """Match packets of a tenant, and of a segment in bridge mode."""
    return {TENANT: tenant, SEGMENT: segment} if segment else {TENANT: tenant}


def classify(tenant: int, segment: int, *, kind: int) -> tuple[Action, ...]:
    """Load the registers of a packet that enters the bridge."""
    scope = segment_scope(tenant, segment)
    return (
        *(SetField(name, number) for name, number in scope.items() if isinstance(number, int)),
        SetField(PKT_SOURCE, kind),
    )


def to_prefix(prefix: Prefix) -> Conditions:
    return address_condition(prefix.family, v4="ip_dst", v6="ipv6_dst", prefix=prefix)


def l3_forward(*, source: int, target: int, port: int, kind: int) -> tuple[Action, ...]:
    """Rewrite MACs, decrement the TTL, and note the output port, which is used after policy has allowed the packet."""
    return (
        SetField("eth_src", source),
        SetField("eth_dst", target),
        DecrementTtl(),
        SetField(OUTPUT_PORT, port),
        SetField(PKT_DESTINATION, kind),
    )


def arp_nd_request(address: Address, mac: int) -> Conditions:
    """Match ARP requests or neighbour solicitations from an address."""
    if address.family == 4:
        return {"eth_type": ETH_P_ARP, "arp_op": 1, "arp_spa": address.number, "arp_sha": mac}
    return {
        "eth_type": ETH_P_IPV6,
        "ip_proto": ICMPV6,
        "icmpv6_type": ND_NEIGHBOR_SOLICIT,
        "icmpv6_code": 0,
        "ipv6_src": address.number,
    }


def arp_nd_target(prefix: Prefix) -> Conditions:
    """Match the target address of ARP or ND packets, without the ether type."""
    condition = address_condition(prefix.family, v4="arp_tpa", v6="nd_target", prefix=prefix)
    del condition["eth_type"]
    return condition


def arp_nd_responder(scope: Conditions, prefix: Prefix, *, priority: int, mac: int = PORT_MAC_INT) -> Flow:
    """Answer ARP requests and neighbour solicitations for a prefix: with the gateway MAC, or that of an endpoint."""
    target = {**scope, **arp_nd_target(prefix)}
    if prefix.family == 4:
        return Flow(
            Table.ARP_RESPONDER,
            priority,
            match({**target, "eth_type": ETH_P_ARP, "arp_op": 1}),
            (
                *_reply_to_sender(mac),
                SetField("arp_op", 2),
                Move("arp_sha", "arp_tha"),
                SetField("arp_sha", mac),
                # OpenFlow has no action that swaps two fields.
                Move("arp_tpa", SCRATCH),
                Move("arp_spa", "arp_tpa"),
                Move(SCRATCH, "arp_spa"),
                Output(OFPP_IN_PORT),
            ),
        )
    conditions = {"eth_type": ETH_P_IPV6, "ip_proto": ICMPV6, "icmpv6_type": ND_NEIGHBOR_SOLICIT, "icmpv6_code": 0}
    return Flow(
        Table.ARP_RESPONDER,
        priority,
        match({**target, **conditions}),
        (
            *_reply_to_sender(mac),
            Move("ipv6_src", "ipv6_dst"),
            Move("nd_target", "ipv6_src"),
            SetField("icmpv6_type", ND_NEIGHBOR_ADVERT),
            # OVS accepts actions on fields of an advertisement only in a flow that matches an advertisement.
            Resubmit(Table.ND_RESPONDER),
        ),
    )


def _reply_to_sender(mac: int) -> tuple[Action, ...]:
    return Move("eth_src", "eth_dst"), SetField("eth_src", mac)
