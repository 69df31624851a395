"""Parts of the node view as flows (pure). No two parts have a flow in common, so they come and go independently.

What segments flood belongs to all their members: `gatherings`.
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
from weft.domain.host_access.state import HostLink, HostPart, RemoteHostReturnRoute
from weft.domain.loadbalancer.state import ServicePart, Vip
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, VerdictCounter

_MAKERS: Mapping[type, tuple[Callable[[Any, FlowContext], Iterator[Flow]], ...]] = {
    TenantNetns: (forwarding.space_flows, policy.space_flows, tenant_netns_flows.space_flows),
    Gateway: (forwarding.gateway_flows, tenant_netns_flows.gateway_flows),
    Overlay: (forwarding.overlay_flows,),
    VlanTrunk: (forwarding.trunk_flows,),
    RemoteRoute: (forwarding.remote_flows,),
    Port: (forwarding.port_flows, l2.port_flows),
    Segment: (policy.segment_flows, tenant_netns_flows.segment_flows),
    RemoteMac: (l2.station_flows,),
    QosProfile: (qos.shape_flows,),
    IpIdentity: (policy.who_flows,),
    CidrIdentity: (policy.where_flows,),
    PolicyEntry: (policy.row_flows,),
    VerdictCounter: (policy.tally_flows,),
    Vip: (tenant_netns_flows.vip_flows,),
    HostLink: (tenant_netns_flows.host_flows,),
    RemoteHostReturnRoute: (tenant_netns_flows.homeward_flows,),
}

# Peers are entries of the overlays' devices; tenants' spaces have the others (`spaces`).
_ELSEWHERE: tuple[type, ...] = (VxlanPeer, *get_args(ServicePart), *get_args(HostPart))


def base_flows() -> tuple[Flow, ...]:
    """What stands whatever the node has."""
    return (*forwarding.base_flows(), *policy.base_flows(), *tenant_netns_flows.base_flows(), *qos.base_flows())


def flows_of(part: StateItem, ground: FlowContext) -> tuple[Flow, ...]:
    """What a part consists of. What needs a tenant or a port that the switch has not is left out."""
    if part.tenant not in ground.tenants:
        return ()
    return tuple(flow for make in _MAKERS.get(type(part), ()) for flow in make(part, ground))


def not_carried(parts: Collection[StateItem]) -> list[str]:
    """What is asked of us and must not be left undone in silence, in words."""
    strange = {type(part).__name__.lower() for part in parts if not isinstance(part, (*_MAKERS, *_ELSEWHERE))}
    return [f"the ovs datapath does not carry a {name} yet" for name in sorted(strange)]


def without_uplinks(parts: Iterable[StateItem]) -> list[str]:
    """The networks of VLAN tags of a node that has no uplinks, in words."""
    tags = sorted(vlan_tag(part.number) for part in parts if isinstance(part, VlanTrunk))
    return [f"frames with VLAN tag {tag} do not leave this node: name its uplinks by --vlan-uplinks" for tag in tags]
