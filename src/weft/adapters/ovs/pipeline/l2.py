"""Flows of bridge mode (pure): a network is an L2 segment, and endpoints are found by MAC (docs/design/bridge.md).

A unicast frame must match MAC and address of the destination: policy goes by addresses, so a frame to the MAC of one
endpoint with the address of another must not pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.adapters.netns.devices import link_local, overlay_mac
from weft.adapters.netns.drop_reasons import DROP_CROSS_NETWORK
from weft.adapters.ovs.openflow.actions import Action, Output, PopVlan, SetField
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    ETH_P_ARP,
    ETH_P_IPV6,
    ETHER_TYPES,
    REPLY_DIRECTION,
    Conditions,
    FlowContext,
    drop_with_reason,
    host_prefix,
    mac_to_int,
)
from weft.adapters.ovs.pipeline.forwarding import (
    ARP_ND,
    GATEWAY,
    ICMPV6,
    LOCAL,
    ND_NEIGHBOR_ADVERT,
    ND_NEIGHBOR_SOLICIT,
    PORT_MAC_INT,
    UPLINK_FRAME,
    OutputPath,
    arp_nd_request,
    arp_nd_responder,
    arp_nd_target,
    classify,
    from_uplink,
    l3_forward,
    path_to_nodes,
    segment_scope,
    to_prefix,
)
from weft.adapters.ovs.pipeline.tables import (
    FROM_OUTSIDE,
    LOCAL_WORKLOAD,
    OUTPUT_PORT,
    PKT_DESTINATION,
    PKT_SOURCE,
    SEGMENT,
    TENANT,
    TENANT_NETNS,
    UPLINK,
    Table,
)
from weft.domain.addresses import Address
from weft.domain.desired.segments import RemoteMac, Segment, vlan_tag
from weft.domain.desired.state import Port

# Priority in `ARP_RESPONDER`, between the gateway, for which the node always answers, and the endpoints, for which it
# answers only with `arpMode` proxy.
_FLOODED = (GATEWAY + LOCAL) // 2
# Priority of remote endpoints. It differs from `LOCAL`: while an endpoint moves, desired state may have it as a local
# port and as a remote MAC, and the local one wins.
_REMOTE = 700
_FROM_OVERLAY = 15
# Priorities in `FLOOD` and, for what is not routed, in `L3_FORWARDING`.
_TO_OWNER, UNROUTED, _TO_ALL, _TO_UPLINK = 3, 2, 2, 1
# Priority in `FLOOD`, above all that forwards.
_CLAIMED = 1000
# The group bit of a MAC.
_MULTICAST = 1 << 40, 1 << 40
_UNICAST = 0, 1 << 40
_ARP_REQUEST: Conditions = {"eth_type": ETH_P_ARP, "arp_op": 1}
_ND: Conditions = {"eth_type": ETH_P_IPV6, "ip_proto": ICMPV6, "icmpv6_code": 0}
_NEIGHBOR_SOLICITATION: Conditions = {**_ND, "icmpv6_type": ND_NEIGHBOR_SOLICIT}
_NEIGHBOR_ADVERTISEMENT: Conditions = {**_ND, "icmpv6_type": ND_NEIGHBOR_ADVERT}
_REQUESTS = {4: _ARP_REQUEST, 6: _NEIGHBOR_SOLICITATION}


def port_flows(item: Port, context: FlowContext) -> Iterator[Flow]:
    """Let a local endpoint on a segment announce its own addresses, and forward to its MAC."""
    port = context.ports.get(item.interface)
    if not item.segment or not port:
        return
    tenant, mac = context.tenants[item.tenant], mac_to_int(item.mac)
    classified = classify(tenant, item.segment, kind=LOCAL_WORKLOAD)
    own_mac: Conditions = {"in_port": port, "eth_src": mac}
    for address in item.addresses:
        yield Flow(Table.CLASSIFIER, ARP_ND, match({**own_mac, **_arp_nd_reply(address, mac)}), classified, Table.FLOOD)
        # Another node, or a machine behind the uplinks, that claims the address.
        claim = {**segment_scope(tenant, item.segment), PKT_SOURCE: FROM_OUTSIDE, **_arp_nd_claim(address)}
        yield Flow(Table.FLOOD, _CLAIMED, match(claim))
    if any(address.family == 6 for address in item.addresses):
        # Neighbour unreachability detection solicits from the link-local address.
        request = {**own_mac, **arp_nd_request(link_local(item.mac), mac)}
        yield Flow(Table.CLASSIFIER, ARP_ND, match(request), classified, Table.ARP_RESPONDER)
    scope = segment_scope(tenant, item.segment)
    path = OutputPath(port, (), LOCAL_WORKLOAD)
    yield from _l2_endpoint_flows(item, path=path, segment=item.segment, context=context)
    for address in item.addresses if vlan_tag(item.segment) else ():
        # A host behind an uplink may be outside the cluster. Forward its request to the owner of the address,
        # which answers itself.
        request = {**scope, PKT_SOURCE: UPLINK, **_REQUESTS[address.family], **arp_nd_target(host_prefix(address))}
        yield Flow(Table.FLOOD, _TO_OWNER, match(request), (Output(port),))


def remote_mac_flows(item: RemoteMac, context: FlowContext) -> Iterator[Flow]:
    """Forward to an endpoint of another node on a segment."""
    if path := path_to_nodes(item.vni, context):
        yield from _l2_endpoint_flows(item, path=path, segment=item.vni, context=context)


def _l2_endpoint_flows(
    item: Port | RemoteMac, *, path: OutputPath, segment: int, context: FlowContext
) -> Iterator[Flow]:
    """Answer ARP and ND for an endpoint on a segment, and forward to it."""
    tenant, mac = context.tenants[item.tenant], mac_to_int(item.mac)
    scope, priority = segment_scope(tenant, segment), LOCAL if path.kind == LOCAL_WORKLOAD else _REMOTE
    yield Flow(Table.FLOOD, priority, match({**scope, "eth_dst": mac}), (*path.encap, Output(path.port)))
    bridged = SetField(OUTPUT_PORT, path.port), SetField(PKT_DESTINATION, path.kind), *path.encap
    # All nodes share the gateway MAC, so behind the uplinks each sends from a MAC of its own: switches learn from it.
    gateway = mac_to_int(overlay_mac(context.vtep)) if path.kind == UPLINK else PORT_MAC_INT
    routed = *l3_forward(source=gateway, target=mac, port=path.port, kind=path.kind), *path.encap
    for address in item.addresses:
        target = to_prefix(host_prefix(address))
        yield arp_nd_responder(scope, host_prefix(address), priority=priority, mac=mac)
        to_mac = {**scope, **target, "eth_dst": mac}
        yield Flow(Table.L3_FORWARDING, priority, match(to_mac), bridged, Table.L4_KEY)
        # A workload with a stale neighbour entry may send to the gateway what is for its own segment.
        by_gateway = {**scope, **target, "eth_dst": PORT_MAC_INT}
        yield Flow(Table.L3_FORWARDING, priority, match(by_gateway), routed, Table.L4_KEY)
        from_netns: Conditions = {TENANT: tenant, PKT_SOURCE: TENANT_NETNS, **target}
        to_segment = SetField(SEGMENT, segment), *routed
        yield Flow(Table.L3_FORWARDING, priority, match(from_netns), to_segment, Table.L4_KEY)
        # Networks reach each other only by services. The node of a backend sees only the reply direction of those.
        from_other_network = {**to_gateway(tenant), **target}
        replies = {**from_other_network, **REPLY_DIRECTION}
        yield Flow(Table.L3_FORWARDING, priority - 1, match(replies), routed, Table.L4_KEY)
        dropped = drop_with_reason(DROP_CROSS_NETWORK)
        yield Flow(Table.L3_FORWARDING, priority - 2, match(from_other_network), dropped)


def to_gateway(tenant: int) -> Conditions:
    """Match what workloads on segments send to their gateway, whatever the destination address."""
    return {TENANT: tenant, PKT_SOURCE: LOCAL_WORKLOAD, "eth_dst": PORT_MAC_INT}


def _arp_nd_reply(address: Address, mac: int) -> Conditions:
    """Match ARP replies and neighbour advertisements, solicited or not, for an address."""
    if address.family == 4:
        return {"eth_type": ETH_P_ARP, "arp_op": 2, "arp_spa": address.number, "arp_sha": mac}
    return {**_NEIGHBOR_ADVERTISEMENT, "ipv6_src": address.number, "nd_target": address.number}


def _arp_nd_claim(address: Address) -> Conditions:
    """Match any ARP packet from an address, and neighbour advertisements for it."""
    if address.family == 4:
        return {"eth_type": ETH_P_ARP, "arp_spa": address.number}
    return {**_NEIGHBOR_ADVERTISEMENT, "nd_target": address.number}


def flood_flows(
    segment: Segment, members: Iterable[Port], *, is_extended: bool, context: FlowContext
) -> Iterator[Flow]:
    """Flows of a segment as a whole: classify what comes from other nodes, and flood to all members.

    The segment `is_extended` to other nodes when it has an overlay or a VLAN tag.
    """
    if segment.tenant not in context.tenants:
        return
    tenant = context.tenants[segment.tenant]
    scope = segment_scope(tenant, segment.number)
    path = path_to_nodes(segment.number, context) if is_extended else None
    if path and path.kind == UPLINK:
        yield from _unknown_unicast_flows(scope, path)
    if path:
        yield from _classifier_flows(segment, path, classify(tenant, segment.number, kind=path.kind), context)
    if segment.floods:
        for request in _REQUESTS.values():
            yield Flow(Table.ARP_RESPONDER, _FLOODED, match({**scope, **request}), (), Table.FLOOD)
        ports = sorted(number for member in members if (number := context.ports.get(member.interface)))
        to_nodes = (*path.encap, Output(path.port)) if path else ()
        # OVS never outputs to the ingress port, so the sender does not receive its own frame. The tag is pushed last.
        yield Flow(Table.FLOOD, _TO_ALL, match({**scope, "eth_dst": _MULTICAST}), (*map(Output, ports), *to_nodes))


def _classifier_flows(
    segment: Segment, path: OutputPath, classified: tuple[Action, ...], context: FlowContext
) -> Iterator[Flow]:
    """Accept frames from other nodes, which have checked the source of what they send."""
    is_uplink = path.kind == UPLINK
    ingress: Conditions = from_uplink(segment.number, context) if is_uplink else {"in_port": path.port}
    actions = (PopVlan(), *classified) if is_uplink else classified
    ip_priority, arp_nd_priority = (UPLINK_FRAME, UPLINK_FRAME + 2) if is_uplink else (_FROM_OVERLAY, ARP_ND)
    for ether_type in ETHER_TYPES.values():
        packets = {**ingress, "eth_type": ether_type}
        yield Flow(Table.CLASSIFIER, ip_priority, match(packets), actions, Table.CONNTRACK_ZONE)
    arp_nd: Iterable[Conditions] = ({"eth_type": ETH_P_ARP}, _NEIGHBOR_SOLICITATION, _NEIGHBOR_ADVERTISEMENT)
    for conditions in arp_nd:
        yield Flow(Table.CLASSIFIER, arp_nd_priority, match({**ingress, **conditions}), actions, Table.FLOOD)


def _unknown_unicast_flows(scope: Conditions, path: OutputPath) -> Iterator[Flow]:
    """Send frames to unknown MACs, and requests for unknown addresses, to the uplinks: hosts outside may have them."""
    from_workload = {**scope, PKT_SOURCE: LOCAL_WORKLOAD}
    for request in _REQUESTS.values():
        yield Flow(Table.ARP_RESPONDER, _TO_UPLINK, match({**from_workload, **request}), (), Table.FLOOD)
    yield Flow(Table.FLOOD, _TO_UPLINK, match(from_workload), (*path.encap, Output(path.port)))
    output = SetField(OUTPUT_PORT, path.port), SetField(PKT_DESTINATION, UPLINK), *path.encap
    for ether_type in ETHER_TYPES.values():
        unicast: Conditions = {**from_workload, "eth_type": ether_type, "eth_dst": _UNICAST}
        yield Flow(Table.L3_FORWARDING, _TO_UPLINK, match(unicast), output, Table.L4_KEY)
        # Frames to the gateway MAC, which every node has, must not leave through the uplinks.
        yield Flow(Table.L3_FORWARDING, UNROUTED, match({**unicast, "eth_dst": PORT_MAC_INT}))
