"""Bridge mode as flows (pure): a network is a segment, on which everyone is found by MAC (docs/design/bridge.md).

What is sent to somebody's MAC must be for one of its addresses too: policy judges by these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.adapters.netns.kernel_state import overlay_mac
from weft.adapters.netns.nft.anti_spoofing import link_local
from weft.adapters.netns.nft.policy_chains import BETWEEN
from weft.adapters.ovs.openflow.actions import Action, Output, PopVlan, SetField
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    ANSWERS,
    ARP,
    ETHER_TYPES,
    V6,
    Conditions,
    FlowContext,
    mac_number,
    prefix_of,
    refused,
)
from weft.adapters.ovs.pipeline.forwarding import (
    ADVERTISEMENT,
    GATEWAY,
    ICMPV6,
    LOCAL,
    PORT_MAC_NUMBER,
    SOLICITATION,
    SOLICITS,
    WIRED,
    Beyond,
    asked_for,
    from_wire,
    introduction,
    neighbour,
    sent_on,
    solicitation,
    to,
    way_beyond,
    whereabouts,
)
from weft.adapters.ovs.pipeline.tables import (
    CAME_FROM,
    FROM_SPACE,
    FROM_WIRE,
    FROM_WORKLOAD,
    GOES_TO,
    LEAVES_BY,
    SEGMENT,
    TENANT,
    Table,
)
from weft.domain.addresses import Address
from weft.domain.desired.segments import RemoteMac, Segment, vlan_tag
from weft.domain.desired.state import Port

# Priority in `NEIGHBOURS`: the node answers for itself, and for others only where nothing is flooded.
_FLOODED = (GATEWAY + LOCAL) // 2
# Priority of who is on another node. It is not that of who is here: an address may be told of in both places while it
# moves.
_BEYOND = 700
_FROM_OVERLAY = 15
_LED, UNROUTED, _TO_ALL, _OUTSIDE = 3, 2, 2, 1
# A MAC that is a group's.
_MANY = 1 << 40, 1 << 40
_ONE = 0, 1 << 40
_ASKS_V4: Conditions = {"eth_type": ARP, "arp_op": 1}
_ASKS_V6: Conditions = {"eth_type": V6, "ip_proto": ICMPV6, "icmpv6_type": SOLICITATION, "icmpv6_code": 0}
_ADVERTISES: Conditions = {"eth_type": V6, "ip_proto": ICMPV6, "icmpv6_type": ADVERTISEMENT, "icmpv6_code": 0}


def port_flows(part: Port, ground: FlowContext) -> Iterator[Flow]:
    """A workload of this node on a segment: it speaks of its own addresses, and is found at its MAC."""
    port = ground.ports.get(part.interface)
    if not part.segment or not port:
        return
    tenant, mac = ground.tenants[part.tenant], mac_number(part.mac)
    known = introduction(tenant, part.segment, kind=FROM_WORKLOAD)
    speaks: Conditions = {"in_port": port, "eth_src": mac}
    for address in part.addresses:
        yield Flow(Table.ARRIVAL, SOLICITS, match({**speaks, **_claim(address, mac)}), known, Table.SPREAD)
    if any(address.family == 6 for address in part.addresses):
        # Who makes sure that a neighbour is still there asks from its link-local address.
        solicits = {**speaks, **solicitation(link_local(part.mac), mac)}
        yield Flow(Table.ARRIVAL, SOLICITS, match(solicits), known, Table.NEIGHBOURS)
    whose = whereabouts(tenant, part.segment)
    yield from _member(part, way=Beyond(port, (), FROM_WORKLOAD), segment=part.segment, ground=ground)
    for address in part.addresses if vlan_tag(part.segment) else ():
        # Who is beyond an uplink need not be of the cluster, and is answered by the one it asks for.
        asks = _ASKS_V4 if address.family == 4 else _ASKS_V6
        led = {**whose, CAME_FROM: FROM_WIRE, **asks, **asked_for(prefix_of(address))}
        yield Flow(Table.SPREAD, _LED, match(led), (Output(port),))


def station_flows(part: RemoteMac, ground: FlowContext) -> Iterator[Flow]:
    """A workload of another node on a segment."""
    if way := way_beyond(part.vni, ground):
        yield from _member(part, way=way, segment=part.vni, ground=ground)


def _member(part: Port | RemoteMac, *, way: Beyond, segment: int, ground: FlowContext) -> Iterator[Flow]:
    """Who is on a segment is known to all of it, and reached on a way."""
    tenant, mac = ground.tenants[part.tenant], mac_number(part.mac)
    whose, priority = whereabouts(tenant, segment), LOCAL if way.kind == FROM_WORKLOAD else _BEYOND
    yield Flow(Table.SPREAD, priority, match({**whose, "eth_dst": mac}), (*way.wrapping, Output(way.port)))
    straight = SetField(LEAVES_BY, way.port), SetField(GOES_TO, way.kind), *way.wrapping
    # Beyond the uplinks every node needs a MAC of its own.
    gateway = mac_number(overlay_mac(ground.vtep)) if way.kind == FROM_WIRE else PORT_MAC_NUMBER
    led = *sent_on(source=gateway, target=mac, port=way.port, kind=way.kind), *way.wrapping
    for address in part.addresses:
        target = to(prefix_of(address))
        yield neighbour(whose, prefix_of(address), priority=priority, mac=mac)
        yield Flow(Table.ROUTE, priority, match({**whose, **target, "eth_dst": mac}), straight, Table.SERVICE)
        # Who has an old MAC of somebody sends to the gateway what need not go there.
        helped_on = {**whose, **target, "eth_dst": PORT_MAC_NUMBER}
        yield Flow(Table.ROUTE, priority, match(helped_on), led, Table.SERVICE)
        from_space: Conditions = {TENANT: tenant, CAME_FROM: FROM_SPACE, **target}
        yield Flow(Table.ROUTE, priority, match(from_space), (SetField(SEGMENT, segment), *led), Table.SERVICE)
        # Between networks only services lead; the nodes of their backends see nothing but answers.
        from_others = {**by_gateway(tenant), **target}
        yield Flow(Table.ROUTE, priority - 1, match({**from_others, **ANSWERS}), led, Table.SERVICE)
        yield Flow(Table.ROUTE, priority - 2, match(from_others), refused(BETWEEN))


def by_gateway(tenant: int) -> Conditions:
    """What workloads on segments send to their gateway, whoever it is for."""
    return {TENANT: tenant, CAME_FROM: FROM_WORKLOAD, "eth_dst": PORT_MAC_NUMBER}


def _claim(address: Address, mac: int) -> Conditions:
    """Somebody who says, asked or not, that it has an address."""
    if address.family == 4:
        return {"eth_type": ARP, "arp_op": 2, "arp_spa": address.number, "arp_sha": mac}
    return {**_ADVERTISES, "ipv6_src": address.number, "nd_target": address.number}


def gathering_flows(segment: Segment, members: Iterable[Port], *, reaches: bool, ground: FlowContext) -> Iterator[Flow]:
    """What depends on who is on the segment: what comes from beyond the node, and what is flooded.

    It `reaches` beyond the node where it has an overlay or a tag for that.
    """
    if segment.tenant not in ground.tenants:
        return
    tenant = ground.tenants[segment.tenant]
    whose = whereabouts(tenant, segment.number)
    way = way_beyond(segment.number, ground) if reaches else None
    if way and way.kind == FROM_WIRE:
        yield from _wire_flows(whose, way)
    if way:
        yield from _arrivals(segment, way, introduction(tenant, segment.number, kind=way.kind), ground)
    if segment.floods:
        for asks in (_ASKS_V4, _ASKS_V6):
            yield Flow(Table.NEIGHBOURS, _FLOODED, match({**whose, **asks}), (), Table.SPREAD)
        ports = sorted(number for member in members if (number := ground.ports.get(member.interface)))
        beyond = (*way.wrapping, Output(way.port)) if way else ()
        yield Flow(Table.SPREAD, _TO_ALL, match({**whose, "eth_dst": _MANY}), (*map(Output, ports), *beyond))


def _arrivals(segment: Segment, way: Beyond, known: tuple[Action, ...], ground: FlowContext) -> Iterator[Flow]:
    """Other nodes send on what their own workloads may say."""
    is_wire = way.kind == FROM_WIRE
    arrives: Conditions = from_wire(segment.number, ground) if is_wire else {"in_port": way.port}
    actions = (PopVlan(), *known) if is_wire else known
    packets, words = (WIRED, WIRED + 2) if is_wire else (_FROM_OVERLAY, SOLICITS)
    for kind in ETHER_TYPES.values():
        yield Flow(Table.ARRIVAL, packets, match({**arrives, "eth_type": kind}), actions, Table.TRACK)
    about_addresses: Iterable[Conditions] = ({"eth_type": ARP}, _ASKS_V6, _ADVERTISES)
    for each in about_addresses:
        yield Flow(Table.ARRIVAL, words, match({**arrives, **each}), actions, Table.SPREAD)


def _wire_flows(whose: Conditions, way: Beyond) -> Iterator[Flow]:
    """Whom nobody knows is looked for beyond the uplinks: a machine that is not of the cluster may be there."""
    from_workload = {**whose, CAME_FROM: FROM_WORKLOAD}
    for asks in (_ASKS_V4, _ASKS_V6):
        yield Flow(Table.NEIGHBOURS, _OUTSIDE, match({**from_workload, **asks}), (), Table.SPREAD)
    yield Flow(Table.SPREAD, _OUTSIDE, match(from_workload), (*way.wrapping, Output(way.port)))
    leaves = SetField(LEAVES_BY, way.port), SetField(GOES_TO, FROM_WIRE), *way.wrapping
    for kind in ETHER_TYPES.values():
        outside: Conditions = {**from_workload, "eth_type": kind, "eth_dst": _ONE}
        yield Flow(Table.ROUTE, _OUTSIDE, match(outside), leaves, Table.SERVICE)
        # What nobody routes stays here.
        yield Flow(Table.ROUTE, UNROUTED, match({**outside, "eth_dst": PORT_MAC_NUMBER}))
