"""The way between the switch and a tenant's space: who passes it, as flows (pure).

A space (`spaces`) is a namespace beside the switch, with the kernel's own means: gateways, names, services, the host.
It stands on two legs, ports of the switch. Workloads send there what is for the space, for a service or for nobody
they know. What a service's call becomes comes back by a leg, as from the workload itself to who answers, and is judged
then. The answers to what came by a leg go back to it, so that the space can translate them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from weft.adapters.ovs.actions import Action, SetField
from weft.adapters.ovs.fields import match
from weft.adapters.ovs.flows import Flow
from weft.adapters.ovs.forwarding import (
    GATEWAY,
    LOCAL,
    PORT_MAC_NUMBER,
    VOICE,
    neighbour,
    sent_to_node,
    to,
    way_beyond,
)
from weft.adapters.ovs.ground import ETHER_TYPES, REPLY, TRACKED, Conditions, Ground, prefix_of
from weft.adapters.ovs.tables import (
    CAME_FROM,
    FROM_SPACE,
    FROM_WORKLOAD,
    GOES_TO,
    LEAVES_BY,
    MARK,
    SEGMENT,
    TENANT,
    Table,
)
from weft.domain.balancing.parts import Vip
from weft.domain.balancing.resolving import DNS_PORT
from weft.domain.hosting.parts import Homeward
from weft.domain.ids import TenantName
from weft.domain.nodeview import Gateway, Space
from weft.domain.policy.protocols import TCP, UDP

LEG_PREFIX: Final = "wl"
OPENED_BY_SPACE, ASKS_SPACE = 1, 2
"""Marks of connections: opened by a leg, or a question to the space itself, which is not for policy to answer."""
_BACK, _NAMES, _OWN = GATEWAY - 20, GATEWAY - 30, GATEWAY - 40
_WAY_OUT = 0
"""Priorities in `ROUTE`: above them the lengths of remote prefixes."""
_PORT_FIELDS = {TCP: "tcp_dst", UDP: "udp_dst"}
_BY_GATEWAY: Conditions = {CAME_FROM: FROM_WORKLOAD, SEGMENT: 0}
"""What workloads have their node lead on, where it routes."""
_ANSWERS: Conditions = {"ct_state": (TRACKED | REPLY, TRACKED | REPLY)}

assert LOCAL < _OWN


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
    """What the space was asked it has answered, whatever policy says."""
    for kind in ETHER_TYPES.values():
        asked: Conditions = {"eth_type": kind, "ct_state": (TRACKED, TRACKED), "ct_mark": ASKS_SPACE}
        yield Flow(Table.SERVICE, 3, match(asked), (), Table.MARKING)


def space_flows(part: Space, ground: Ground) -> Iterator[Flow]:
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
        back = {**own, **_ANSWERS, "ct_mark": OPENED_BY_SPACE}
        yield Flow(Table.ROUTE, _BACK, match(back), leads, Table.SERVICE)
        asks: Conditions = {**own, **_BY_GATEWAY}
        yield Flow(Table.ROUTE, _WAY_OUT, match(asks), leads, Table.SERVICE)


def gateway_flows(part: Gateway, ground: Ground) -> Iterator[Flow]:
    """A gateway is in the space. Who may ask it for which names is for netdns to say."""
    leads = _to_space(part.tenant, ground)
    if leads and not part.segment:
        asks = _calls(part, ground)
        yield Flow(Table.ROUTE, _OWN, match(asks), leads, Table.SERVICE)
        for protocol, field in _PORT_FIELDS.items():
            names = {**asks, "ip_proto": protocol, field: DNS_PORT}
            yield Flow(Table.ROUTE, _NAMES, match(names), (*leads, SetField(MARK, ASKS_SPACE)), Table.MARKING)


def vip_flows(part: Vip, ground: Ground) -> Iterator[Flow]:
    """Services are balanced in the space; no rule speaks about their addresses."""
    yield neighbour({TENANT: ground.tenants[part.tenant]}, prefix_of(part.address), priority=GATEWAY)
    if leads := _to_space(part.tenant, ground):
        asked = (*leads, SetField(MARK, ASKS_SPACE))
        yield Flow(Table.ROUTE, _OWN, match(_calls(part, ground)), asked, Table.MARKING)


def homeward_flows(part: Homeward, ground: Ground) -> Iterator[Flow]:
    """What answers the host of another node goes back by the overlay or the uplinks, as the call came."""
    if way := way_beyond(part.vni, ground):
        back: Conditions = {TENANT: ground.tenants[part.tenant], **to(prefix_of(part.address)), **_ANSWERS}
        yield Flow(
            Table.ROUTE,
            _BACK,
            match({**back, "ct_mark": 0, CAME_FROM: FROM_WORKLOAD}),
            sent_to_node(part.vtep, way, ground),
            Table.SERVICE,
        )


def _calls(part: Gateway | Vip, ground: Ground) -> Conditions:
    """What workloads of a tenant send to an address."""
    return {TENANT: ground.tenants[part.tenant], **_BY_GATEWAY, **to(prefix_of(part.address))}


def _to_space(tenant: TenantName, ground: Ground) -> tuple[Action, ...]:
    """Nothing while the space has no leg. The space is the hop that is counted."""
    port = ground.ports.get(near_leg(ground.tenants[tenant]))
    if not port:
        return ()
    return SetField("eth_dst", PORT_MAC_NUMBER), SetField(LEAVES_BY, port), SetField(GOES_TO, FROM_SPACE)
