"""Translate state items to flows (pure), by a table from their type to flow builders.

No two state items have a flow in common, so each can be added and removed alone. Flood flows, which depend on all
members of a segment, are in `flood_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline import forwarding, l2, policy, qos, tenant_netns_flows
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.domain.desired.segments import RemoteMac, Segment, vlan_tag
from weft.domain.desired.state import (
    Gateway,
    Overlay,
    Port,
    QosProfile,
    RemoteRoute,
    StateItem,
    TenantNetns,
    VlanTrunk,
    VxlanPeer,
)
from weft.domain.host_access.state import HostAccessItem, HostLink, RemoteHostReturnRoute
from weft.domain.loadbalancer.state import ServiceItem, Vip
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, VerdictCounter

_BUILDERS: Mapping[type, tuple[Callable[[Any, FlowContext], Iterator[Flow]], ...]] = {
    TenantNetns: (forwarding.tenant_flows, policy.tenant_flows, tenant_netns_flows.tenant_flows),
    Gateway: (forwarding.gateway_flows, tenant_netns_flows.gateway_flows),
    Overlay: (forwarding.overlay_flows,),
    VlanTrunk: (forwarding.trunk_flows,),
    RemoteRoute: (forwarding.remote_flows,),
    Port: (forwarding.port_flows, l2.port_flows),
    Segment: (policy.segment_flows, tenant_netns_flows.segment_flows),
    RemoteMac: (l2.remote_mac_flows,),
    QosProfile: (qos.qos_flows,),
    IpIdentity: (policy.ip_identity_flows,),
    CidrIdentity: (policy.cidr_identity_flows,),
    PolicyEntry: (policy.policy_entry_flows,),
    VerdictCounter: (policy.verdict_counter_flows,),
    Vip: (tenant_netns_flows.vip_flows,),
    HostLink: (tenant_netns_flows.host_flows,),
    RemoteHostReturnRoute: (tenant_netns_flows.remote_host_return_flows,),
}

# State items without flows: VXLAN peers are FDB entries of the overlay devices, the others live in the tenant netns.
_WITHOUT_FLOWS: tuple[type, ...] = (VxlanPeer, *get_args(ServiceItem), *get_args(HostAccessItem))


def base_flows() -> tuple[Flow, ...]:
    """Flows that do not depend on desired state."""
    return (*forwarding.base_flows(), *policy.base_flows(), *tenant_netns_flows.base_flows(), *qos.base_flows())


def flows_of(item: StateItem, context: FlowContext) -> tuple[Flow, ...]:
    """The flows of a state item, without those that need a tenant ID or port that does not exist yet."""
    if item.tenant not in context.tenants:
        return ()
    return tuple(flow for build in _BUILDERS.get(type(item), ()) for flow in build(item, context))


def unsupported_items(items: Collection[StateItem]) -> list[str]:
    """An error message for each type of state item that this datapath does not implement."""
    known = (*_BUILDERS, *_WITHOUT_FLOWS)
    unknown = {type(item).__name__.lower() for item in items if not isinstance(item, known)}
    return [f"the ovs datapath does not support {name} yet" for name in sorted(unknown)]


def tags_without_uplink(items: Iterable[StateItem]) -> list[str]:
    """A warning for each VLAN network, for a node without uplinks."""
    tags = sorted(vlan_tag(item.number) for item in items if isinstance(item, VlanTrunk))
    return [f"frames with VLAN tag {tag} do not leave this node: name its uplinks by --vlan-uplinks" for tag in tags]
