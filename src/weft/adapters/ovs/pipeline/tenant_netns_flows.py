"""The way between the switch and a tenant's space: who passes it, as flows (pure).

A space (`spaces`) is a namespace beside the switch, with the kernel's own means: gateways, names, services, the host.
It stands on two legs, ports of the switch. Workloads send there what is for the space, for a service or for nobody
they know. What a service's call becomes comes back by a leg, as from the workload itself to who answers, and is judged
then. The answers to what came by a leg go back to it, so that the space can translate them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from weft.adapters.netns.nft.policy_chains import BETWEEN, SPOOFED
from weft.adapters.ovs.openflow.actions import Action, SetField
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    ANSWERS,
    ETHER_TYPES,
    TRACKED,
    Conditions,
    FlowContext,
    address_condition,
    prefix_of,
    refused,
)
from weft.adapters.ovs.pipeline.forwarding import (
    GATEWAY,
    LOCAL,
    PORT_MAC_NUMBER,
    VOICE,
    neighbour,
    sent_to_node,
    to,
    way_beyond,
)
from weft.adapters.ovs.pipeline.l2 import UNROUTED, by_gateway
from weft.adapters.ovs.pipeline.policy import ASKED_OF_SPACE
from weft.adapters.ovs.pipeline.tables import (
    CAME_FROM,
    FROM_SPACE,
    FROM_WIRE,
    FROM_WORKLOAD,
    GOES_TO,
    LEAVES_BY,
    MARK,
    SEGMENT,
    TENANT,
    Table,
)
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Gateway, TenantNetns
from weft.domain.host_access.state import HostLink, RemoteHostReturnRoute
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.cluster_dns import DNS_PORT
from weft.domain.loadbalancer.state import Vip
from weft.domain.policy.model.protocols import TCP, UDP

LEG_PREFIX: Final = "wl"
# Marks of connections: opened by a leg, or a question to the space itself, which is not for policy to answer.
OPENED_BY_SPACE, ASKS_SPACE = 1, 2
_FORGED, _SERVICE, _BACK, _BACK_ON_SEGMENT = GATEWAY + 20, GATEWAY + 10, GATEWAY - 20, GATEWAY - 21
_NAMES, _OWN, _OTHERS = GATEWAY - 30, GATEWAY - 40, GATEWAY - 50
# Priorities in `ROUTE`. An address of a service may be told of as a gateway's too.
_OUT_OF_SEGMENT, _WAY_OUT = UNROUTED + 1, 0
_PORT_FIELDS = {TCP: "tcp_dst", UDP: "udp_dst"}

assert LOCAL < _OTHERS


def near_leg(tenant: int) -> str:
    """The leg by which workloads of this node and their space reach each other, by the tenant's number."""
    return f"{LEG_PREFIX}{tenant}"


def far_leg(tenant: int) -> str:
    """The leg by which a space reaches workloads of other nodes."""
    return f"{LEG_PREFIX}{tenant}x"


def legs_of(tenants: Mapping[TenantName, int]) -> dict[str, TenantName]:
    """The legs of some tenants, and whose they are."""
    return {name: tenant for tenant, number in tenants.items() for name in (near_leg(number), far_leg(number))}


def base_flows() -> Iterator[Flow]:
    """What the space is asked, and what it answers, passes whatever policy says.

    What goes on to the same address when that is somebody else's is judged as all else.
    """
    for kind in ETHER_TYPES.values():
        for place in (CAME_FROM, GOES_TO):
            asked: Conditions = {"eth_type": kind, "ct_state": (TRACKED, TRACKED), "ct_mark": ASKS_SPACE}
            yield Flow(Table.SERVICE, ASKED_OF_SPACE, match({**asked, place: FROM_SPACE}), (), Table.MARKING)


def space_flows(part: TenantNetns, ground: FlowContext) -> Iterator[Flow]:
    """What comes from the space speaks for whom it says; answers find their way back, and others the way out."""
    tenant = ground.tenants[part.tenant]
    for name in (near_leg(tenant), far_leg(tenant)):
        for kind in ETHER_TYPES.values() if name in ground.ports else ():
            known = (SetField(TENANT, tenant), SetField(CAME_FROM, FROM_SPACE), SetField(MARK, OPENED_BY_SPACE))
            arrives: Conditions = {"in_port": ground.ports[name], "eth_type": kind}
            yield Flow(Table.ARRIVAL, VOICE, match(arrives), known, Table.TRACK)
    leads = _to_space(part.tenant, ground)
    for kind in ETHER_TYPES.values() if leads else ():
        own: Conditions = {TENANT: tenant, "eth_type": kind}
        back = {**own, **ANSWERS, "ct_mark": OPENED_BY_SPACE}
        yield Flow(Table.ROUTE, _BACK, match(back), leads, Table.SERVICE)
        asks: Conditions = {**own, CAME_FROM: FROM_WORKLOAD, SEGMENT: 0}
        yield Flow(Table.ROUTE, _WAY_OUT, match(asks), leads, Table.SERVICE)


def segment_flows(part: Segment, ground: FlowContext) -> Iterator[Flow]:
    """What workloads of a segment send to their gateway, for nobody whom the tenant knows, is for the space."""
    leads = _to_space(part.tenant, ground)
    for kind in ETHER_TYPES.values() if leads else ():
        asks = {**by_gateway(ground.tenants[part.tenant]), SEGMENT: part.number, "eth_type": kind}
        yield Flow(Table.ROUTE, _OUT_OF_SEGMENT, match(asks), leads, Table.SERVICE)


def gateway_flows(part: Gateway, ground: FlowContext) -> Iterator[Flow]:
    """A gateway is in the space, for those of its own segment. Who may ask it for names is for netdns to say."""
    if leads := _to_space(part.tenant, ground):
        calls = _calls(part, ground)
        asks: Conditions = {**calls, SEGMENT: part.segment}
        yield Flow(Table.ROUTE, _OWN, match(asks), leads, Table.SERVICE)
        for protocol, field in _PORT_FIELDS.items():
            names = {**asks, "ip_proto": protocol, field: DNS_PORT}
            yield Flow(Table.ROUTE, _NAMES, match(names), (*leads, SetField(MARK, ASKS_SPACE)), Table.MARKING)
        if part.segment:
            yield Flow(Table.ROUTE, _OTHERS, match(calls), refused(BETWEEN))


def vip_flows(part: Vip, ground: FlowContext) -> Iterator[Flow]:
    """Services are balanced in the space; no rule speaks about their addresses."""
    yield neighbour({TENANT: ground.tenants[part.tenant]}, prefix_of(part.address), priority=GATEWAY)
    if leads := _to_space(part.tenant, ground):
        asked = (*leads, SetField(MARK, ASKS_SPACE))
        yield Flow(Table.ROUTE, _SERVICE, match(_calls(part, ground)), asked, Table.MARKING)


def host_flows(part: HostLink, ground: FlowContext) -> Iterator[Flow]:
    """Nobody beyond the uplinks is this node's host, which policy lets in whatever it says."""
    for address in part.addresses:
        speaks = address_condition(address.family, v4="ip_src", v6="ipv6_src", prefix=prefix_of(address))
        claims: Conditions = {TENANT: ground.tenants[part.tenant], CAME_FROM: FROM_WIRE, **speaks}
        yield Flow(Table.ROUTE, _FORGED, match(claims), refused(SPOOFED))


def homeward_flows(part: RemoteHostReturnRoute, ground: FlowContext) -> Iterator[Flow]:
    """What answers the host of another node goes back by the overlay or the uplinks, as the call came."""
    if way := way_beyond(part.vni, ground):
        back: Conditions = {**_calls(part, ground), **ANSWERS, "ct_mark": 0}
        routed = sent_to_node(part.vtep, way, ground)
        yield Flow(Table.ROUTE, _BACK, match({**back, SEGMENT: 0}), routed, Table.SERVICE)
        on_segment = sent_to_node(part.vtep, way, ground, on_segment=True)
        yield Flow(Table.ROUTE, _BACK_ON_SEGMENT, match(back), on_segment, Table.SERVICE)


def _calls(part: Gateway | Vip | RemoteHostReturnRoute, ground: FlowContext) -> Conditions:
    """What workloads of a tenant send to an address."""
    return {TENANT: ground.tenants[part.tenant], CAME_FROM: FROM_WORKLOAD, **to(prefix_of(part.address))}


def _to_space(tenant: TenantName, ground: FlowContext) -> tuple[Action, ...]:
    """Nothing while the space has no leg. The space is the hop that is counted."""
    port = ground.ports.get(near_leg(ground.tenants[tenant]))
    if not port:
        return ()
    return SetField("eth_dst", PORT_MAC_NUMBER), SetField(LEAVES_BY, port), SetField(GOES_TO, FROM_SPACE)
