"""Parts of the node view as flows (pure). No two parts have a flow in common, so they come and go independently.

What segments flood belongs to all their members: `gatherings`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, get_args

from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline import forwarding, l2, policy, qos, tenant_netns_flows
from weft.adapters.ovs.pipeline.context import Ground
from weft.domain.desired.segments import Segment, Station, vlan_tag
from weft.domain.desired.state import Gateway, Overlay, Part, Peer, Port, Remote, Shape, Space, Trunk
from weft.domain.host_access.state import Homeward, HostLink, HostPart
from weft.domain.loadbalancer.state import ServicePart, Vip
from weft.domain.policy.policymap.policy_state import Row, Tally, Where, Who

_MAKERS: Mapping[type, tuple[Callable[[Any, Ground], Iterator[Flow]], ...]] = {
    Space: (forwarding.space_flows, policy.space_flows, tenant_netns_flows.space_flows),
    Gateway: (forwarding.gateway_flows, tenant_netns_flows.gateway_flows),
    Overlay: (forwarding.overlay_flows,),
    Trunk: (forwarding.trunk_flows,),
    Remote: (forwarding.remote_flows,),
    Port: (forwarding.port_flows, l2.port_flows),
    Segment: (policy.segment_flows, tenant_netns_flows.segment_flows),
    Station: (l2.station_flows,),
    Shape: (qos.shape_flows,),
    Who: (policy.who_flows,),
    Where: (policy.where_flows,),
    Row: (policy.row_flows,),
    Tally: (policy.tally_flows,),
    Vip: (tenant_netns_flows.vip_flows,),
    HostLink: (tenant_netns_flows.host_flows,),
    Homeward: (tenant_netns_flows.homeward_flows,),
}

_ELSEWHERE: tuple[type, ...] = (Peer, *get_args(ServicePart), *get_args(HostPart))
"""Peers are entries of the overlays' devices; tenants' spaces have the others (`spaces`)."""


def base_flows() -> tuple[Flow, ...]:
    """What stands whatever the node has."""
    return (*forwarding.base_flows(), *policy.base_flows(), *tenant_netns_flows.base_flows(), *qos.base_flows())


def flows_of(part: Part, ground: Ground) -> tuple[Flow, ...]:
    """What a part consists of. What needs a tenant or a port that the switch has not is left out."""
    if part.tenant not in ground.tenants:
        return ()
    return tuple(flow for make in _MAKERS.get(type(part), ()) for flow in make(part, ground))


def not_carried(parts: Collection[Part]) -> list[str]:
    """What is asked of us and must not be left undone in silence, in words."""
    strange = {type(part).__name__.lower() for part in parts if not isinstance(part, (*_MAKERS, *_ELSEWHERE))}
    return [f"the ovs datapath does not carry a {name} yet" for name in sorted(strange)]


def without_uplinks(parts: Iterable[Part]) -> list[str]:
    """The networks of VLAN tags of a node that has no uplinks, in words."""
    tags = sorted(vlan_tag(part.number) for part in parts if isinstance(part, Trunk))
    return [f"frames with VLAN tag {tag} do not leave this node: name its uplinks by --vlan-uplinks" for tag in tags]
