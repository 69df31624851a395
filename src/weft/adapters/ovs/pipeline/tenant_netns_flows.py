"""Flows between the integration bridge and tenant network namespaces (pure).

A tenant netns (`weft.adapters.ovs.tenant_netns`) is attached by two internal ports. The kernel there has the gateways,
DNS sockets, service load balancing and the link to the host. Workloads send it packets to gateways, service VIPs and
destinations outside the tenant. After DNAT a service packet comes back through such a port, from the workload's address
to that of the backend, and passes policy then. Replies of connections that came from the netns go back to it, so that
it can reverse the translation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.adapters.netns.devices import NETNS_PORT_PREFIX
from weft.adapters.netns.drop_reasons import DROP_CROSS_NETWORK, DROP_SPOOFED
from weft.adapters.ovs.openflow.actions import Action, SetField
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    CS_TRACKED,
    ETHER_TYPES,
    REPLY_DIRECTION,
    Conditions,
    FlowContext,
    address_condition,
    drop_with_reason,
    host_prefix,
)
from weft.adapters.ovs.pipeline.forwarding import (
    GATEWAY,
    LOCAL,
    PORT_MAC_INT,
    SPOOFGUARD,
    arp_nd_responder,
    forward_to_node,
    path_to_nodes,
    to_prefix,
)
from weft.adapters.ovs.pipeline.l2 import UNROUTED, to_gateway
from weft.adapters.ovs.pipeline.policy import TO_NETNS
from weft.adapters.ovs.pipeline.tables import (
    CT_MARK,
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
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Gateway, TenantNetns
from weft.domain.host_access.state import HostLink, RemoteHostReturnRoute
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.cluster_dns import DNS_PORT
from weft.domain.loadbalancer.state import Vip
from weft.domain.policy.model.protocols import TCP, UDP

# Values of `ct_mark`: the connection came from the tenant netns, or is addressed to it, which exempts it from policy.
MARK_FROM_NETNS, MARK_TO_NETNS = 1, 2
# Priorities in `L3_FORWARDING`. A VIP wins over a gateway with the same address.
_SPOOFED_HOST, _SERVICE, _REPLY, _REPLY_ON_SEGMENT = GATEWAY + 20, GATEWAY + 10, GATEWAY - 20, GATEWAY - 21
_DNS, _OWN_GATEWAY, _OTHER_GATEWAY = GATEWAY - 30, GATEWAY - 40, GATEWAY - 50
_OUT_OF_SEGMENT, _DEFAULT_ROUTE = UNROUTED + 1, 0
_PORT_FIELDS = {TCP: "tcp_dst", UDP: "udp_dst"}

# Packets to a gateway must not match the flows of workloads.
assert LOCAL < _OTHER_GATEWAY


def local_netns_port(tenant: int) -> str:
    """The port between the netns and workloads of this node, by tenant ID."""
    return f"{NETNS_PORT_PREFIX}{tenant}"


def remote_netns_port(tenant: int) -> str:
    """The port from the netns to workloads of other nodes, by tenant ID."""
    return f"{NETNS_PORT_PREFIX}{tenant}x"


def netns_ports(tenants: Mapping[TenantName, int]) -> dict[str, TenantName]:
    """The netns ports of tenants, each with its tenant."""
    return {
        name: tenant
        for tenant, number in tenants.items()
        for name in (local_netns_port(number), remote_netns_port(number))
    }


def base_flows() -> Iterator[Flow]:
    """Skip policy for connections to the netns itself, in both directions.

    The netns port is matched too: a packet that the netns forwards with the same address to a workload passes policy.
    """
    for ether_type in ETHER_TYPES.values():
        for locality in (PKT_SOURCE, PKT_DESTINATION):
            ct_state = CS_TRACKED, CS_TRACKED
            exempt: Conditions = {"eth_type": ether_type, "ct_state": ct_state, "ct_mark": MARK_TO_NETNS}
            conditions = match({**exempt, locality: TENANT_NETNS})
            yield Flow(Table.L4_KEY, TO_NETNS, conditions, (), Table.EGRESS_METER)


def tenant_flows(item: TenantNetns, context: FlowContext) -> Iterator[Flow]:
    """Classify packets from the netns, return replies to it, and make it the default route of workloads."""
    tenant = context.tenants[item.tenant]
    classified = SetField(TENANT, tenant), SetField(PKT_SOURCE, TENANT_NETNS), SetField(CT_MARK, MARK_FROM_NETNS)
    for name in (local_netns_port(tenant), remote_netns_port(tenant)):
        for ether_type in ETHER_TYPES.values() if name in context.ports else ():
            # No SpoofGuard here: the netns sends with the addresses of workloads whose packets it translates.
            ingress: Conditions = {"in_port": context.ports[name], "eth_type": ether_type}
            yield Flow(Table.CLASSIFIER, SPOOFGUARD, match(ingress), classified, Table.CONNTRACK_ZONE)
    to_netns = _to_netns(item.tenant, context)
    for ether_type in ETHER_TYPES.values() if to_netns else ():
        packets: Conditions = {TENANT: tenant, "eth_type": ether_type}
        reply = {**packets, **REPLY_DIRECTION, "ct_mark": MARK_FROM_NETNS}
        yield Flow(Table.L3_FORWARDING, _REPLY, match(reply), to_netns, Table.L4_KEY)
        unrouted: Conditions = {**packets, PKT_SOURCE: LOCAL_WORKLOAD, SEGMENT: 0}
        yield Flow(Table.L3_FORWARDING, _DEFAULT_ROUTE, match(unrouted), to_netns, Table.L4_KEY)


def segment_flows(item: Segment, context: FlowContext) -> Iterator[Flow]:
    """Make the netns the default route of workloads on a segment, for packets to the gateway MAC."""
    to_netns = _to_netns(item.tenant, context)
    for ether_type in ETHER_TYPES.values() if to_netns else ():
        unrouted = {**to_gateway(context.tenants[item.tenant]), SEGMENT: item.number, "eth_type": ether_type}
        yield Flow(Table.L3_FORWARDING, _OUT_OF_SEGMENT, match(unrouted), to_netns, Table.L4_KEY)


def gateway_flows(item: Gateway, context: FlowContext) -> Iterator[Flow]:
    """Forward packets for a gateway to the netns, from its own segment only. DNS is exempt from policy."""
    if to_netns := _to_netns(item.tenant, context):
        from_workload = _from_workload_to(item, context)
        own_segment: Conditions = {**from_workload, SEGMENT: item.segment}
        yield Flow(Table.L3_FORWARDING, _OWN_GATEWAY, match(own_segment), to_netns, Table.L4_KEY)
        exempt = *to_netns, SetField(CT_MARK, MARK_TO_NETNS)
        for protocol, field in _PORT_FIELDS.items():
            # netdns decides by itself who may query.
            dns = {**own_segment, "ip_proto": protocol, field: DNS_PORT}
            yield Flow(Table.L3_FORWARDING, _DNS, match(dns), exempt, Table.EGRESS_METER)
        if item.segment:
            dropped = drop_with_reason(DROP_CROSS_NETWORK)
            yield Flow(Table.L3_FORWARDING, _OTHER_GATEWAY, match(from_workload), dropped)


def vip_flows(item: Vip, context: FlowContext) -> Iterator[Flow]:
    """Forward packets for a service VIP to the netns, which load-balances. Policy applies to the backend instead."""
    yield arp_nd_responder({TENANT: context.tenants[item.tenant]}, host_prefix(item.address), priority=GATEWAY)
    if to_netns := _to_netns(item.tenant, context):
        exempt = *to_netns, SetField(CT_MARK, MARK_TO_NETNS)
        to_vip = match(_from_workload_to(item, context))
        yield Flow(Table.L3_FORWARDING, _SERVICE, to_vip, exempt, Table.EGRESS_METER)


def host_flows(item: HostLink, context: FlowContext) -> Iterator[Flow]:
    """Drop packets from the uplinks that spoof an address of this host, which policy always allows."""
    for address in item.addresses:
        from_host = address_condition(address.family, v4="ip_src", v6="ipv6_src", prefix=host_prefix(address))
        spoofed: Conditions = {TENANT: context.tenants[item.tenant], PKT_SOURCE: UPLINK, **from_host}
        yield Flow(Table.L3_FORWARDING, _SPOOFED_HOST, match(spoofed), drop_with_reason(DROP_SPOOFED))


def remote_host_return_flows(item: RemoteHostReturnRoute, context: FlowContext) -> Iterator[Flow]:
    """Return replies to the host of another node through the overlay or uplinks, as the request came."""
    if path := path_to_nodes(item.vni, context):
        # Connections with a mark go through the netns of this node.
        reply: Conditions = {**_from_workload_to(item, context), **REPLY_DIRECTION, "ct_mark": 0}
        routed = forward_to_node(item.vtep, path, context)
        yield Flow(Table.L3_FORWARDING, _REPLY, match({**reply, SEGMENT: 0}), routed, Table.L4_KEY)
        on_segment = forward_to_node(item.vtep, path, context, on_segment=True)
        yield Flow(Table.L3_FORWARDING, _REPLY_ON_SEGMENT, match(reply), on_segment, Table.L4_KEY)


def _from_workload_to(item: Gateway | Vip | RemoteHostReturnRoute, context: FlowContext) -> Conditions:
    """Match what workloads of the tenant send to an address."""
    tenant = context.tenants[item.tenant]
    return {TENANT: tenant, PKT_SOURCE: LOCAL_WORKLOAD, **to_prefix(host_prefix(item.address))}


def _to_netns(tenant: TenantName, context: FlowContext) -> tuple[Action, ...]:
    """Forward to the tenant netns; no actions while it has no port."""
    port = context.ports.get(local_netns_port(context.tenants[tenant]))
    if not port:
        return ()
    # No TTL decrement: the kernel in the netns is the router.
    return SetField("eth_dst", PORT_MAC_INT), SetField(OUTPUT_PORT, port), SetField(PKT_DESTINATION, TENANT_NETNS)
