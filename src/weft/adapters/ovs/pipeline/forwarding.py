"""Who may speak, who is where, and how packets get there in routing mode: parts of the node view as flows (pure)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from weft.adapters.netns.kernel_state import PORT_MAC, overlay_hop_mac, overlay_mac, overlay_name
from weft.adapters.netns.nft.policy_chains import INVALID as OF_NO_CONNECTION
from weft.adapters.netns.nft.policy_chains import ROUTER, SPOOFED
from weft.adapters.ovs.openflow.actions import (
    IN_PORT,
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
from weft.adapters.ovs.openflow.fields import IS_PIECE, match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    ARP,
    ETHER_TYPES,
    INVALID,
    NEW,
    TRACKED,
    V6,
    Conditions,
    FlowContext,
    address_condition,
    mac_number,
    prefix_of,
    refused,
)
from weft.adapters.ovs.pipeline.tables import (
    CAME_FROM,
    FROM_NODE,
    FROM_WIRE,
    FROM_WORKLOAD,
    GOES_TO,
    LEAVES_BY,
    MARK,
    SCRATCH,
    SEGMENT,
    TENANT,
    Table,
)
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.segments import vlan_tag
from weft.domain.desired.state import Gateway, Overlay, Port, Prefix, RemoteRoute, TenantNetns, VlanTrunk

_ICMP, ICMPV6 = 1, 58
SOLICITATION, ADVERTISEMENT, _ROUTER, _REDIRECT = 135, 136, 134, 137
# By family: the field, a request's type, an answer's, the protocol.
_ECHOES = {4: ("icmp_type", 8, 0, _ICMP), 6: ("icmpv6_type", 128, 129, ICMPV6)}
_HOPS = 64
# A `vlan_vid` of a frame that has a tag.
_ANY_TAG = 0x1000, 0x1000
_LINK_LOCAL = (0xFE80 << 112, 0xFFC0 << 112)
_ROUTER_SOLICITED_OVERRIDE, _SOLICITED_OVERRIDE = 0xE0000000, 0x60000000
_SOURCE = {4: "ip_src", 6: "ipv6_src"}
_TARGET = {4: "ip_dst", 6: "ipv6_dst"}

# Priorities in `ARRIVAL`.
_REFUSED, WIRED, _TAGGED, _OWN_NAME, SOLICITS, VOICE, _NOISE, _NOBODY = 90, 80, 70, 50, 40, 30, 20, 10
# Priorities in `ROUTE`; below them the length of a remote prefix is its priority.
_NO_CONNECTION, GATEWAY, LOCAL = 1000, 900, 800

PORT_MAC_NUMBER = mac_number(PORT_MAC)


def base_flows() -> Iterator[Flow]:
    """What stands whatever the node has."""
    yield Flow(Table.ARRIVAL, _TAGGED, match({"vlan_vid": _ANY_TAG}))
    for kind in (_ROUTER, _REDIRECT):
        yield Flow(
            Table.ARRIVAL, _REFUSED, match({"eth_type": V6, "ip_proto": ICMPV6, "icmpv6_type": kind}), refused(ROUTER)
        )
    for source in (0, _LINK_LOCAL):
        # What every kernel says on a new link, and nobody has to hear.
        yield Flow(Table.ARRIVAL, _NOISE, match({"eth_type": V6, "ip_proto": ICMPV6, "ipv6_src": source}))
    advertises: Conditions = {
        "eth_type": V6,
        "ip_proto": ICMPV6,
        "icmpv6_type": ADVERTISEMENT,
        "icmpv6_code": 0,
    }
    for priority, by, flags in (
        (2, {"eth_src": PORT_MAC_NUMBER}, _ROUTER_SOLICITED_OVERRIDE),
        (1, {}, _SOLICITED_OVERRIDE),
    ):
        yield Flow(
            Table.ADVERTISE,
            priority,
            match({**advertises, **by}),
            (
                SetField("nd_options_type", 2),
                Move("eth_src", "nd_tll"),
                SetField("nd_reserved", flags),
                Output(IN_PORT),
            ),
        )
    for kind in ETHER_TYPES.values():
        yield Flow(Table.TRACK, 1, match({"eth_type": kind}), (Ct(TENANT, Table.ROUTE),))
        # Pieces that wait in vain for others come out of the tracker among whoever is there then.
        lonely: Conditions = {"eth_type": kind, "ip_frag": IS_PIECE, "ct_state": (INVALID, INVALID)}
        yield Flow(Table.ROUTE, _NO_CONNECTION + 1, match(lonely))
        new: Conditions = {"eth_type": kind, "ct_state": (NEW | TRACKED, NEW | TRACKED)}
        piece: Conditions = {"eth_type": kind, "ip_frag": IS_PIECE}
        again = Ct(TENANT, Table.WHOLE, commit=True, mark=MARK)
        yield Flow(Table.LEAVE, 4, match({**new, **piece}), (again,))
        # It leaves first, else pieces that waited in vain might leave with it; no answer overtakes the tracker, as one
        # thread of the switch does both.
        yield Flow(Table.LEAVE, 3, match(new), (OutputRegister(LEAVES_BY), Ct(TENANT, commit=True, mark=MARK)))
        yield Flow(Table.LEAVE, 2, match(piece), (Ct(TENANT, Table.WHOLE),))
        yield Flow(Table.LEAVE, 1, match({"eth_type": kind}), (OutputRegister(LEAVES_BY),))
    yield Flow(Table.WHOLE, 1, match({"ct_state": (0, INVALID)}), (OutputRegister(LEAVES_BY),))


def space_flows(part: TenantNetns, ground: FlowContext) -> Iterator[Flow]:
    """Nothing of the tenant passes that belongs to no connection."""
    conditions: Conditions = {TENANT: ground.tenants[part.tenant], "ct_state": (INVALID, INVALID)}
    yield Flow(Table.ROUTE, _NO_CONNECTION, match(conditions), refused(OF_NO_CONNECTION))


def gateway_flows(part: Gateway, ground: FlowContext) -> Iterator[Flow]:
    """The gateway is known to its neighbours, and answers to echo requests of workloads."""
    whose, address = whereabouts(ground.tenants[part.tenant], part.segment), part.address
    yield neighbour(whose, prefix_of(address), priority=GATEWAY)
    field, request, answer, protocol = _ECHOES[address.family]
    yield Flow(
        Table.ROUTE,
        GATEWAY,
        match(
            {
                **whose,
                CAME_FROM: FROM_WORKLOAD,
                **to(prefix_of(address)),
                "ip_proto": protocol,
                field: request,
            }
        ),
        (
            *_back_to_sender(PORT_MAC_NUMBER),
            Move(_SOURCE[address.family], _TARGET[address.family]),
            SetField(_SOURCE[address.family], address.number),
            SetField(field, answer),
            SetField("nw_ttl", _HOPS),
            Output(IN_PORT),
        ),
    )


def overlay_flows(part: Overlay, ground: FlowContext) -> Iterator[Flow]:
    """What other nodes send to this one on the overlay belongs to its tenant."""
    if port := ground.ports.get(overlay_name(part.vni)):
        hop = mac_number(overlay_hop_mac(ground.vtep))
        for kind in ETHER_TYPES.values():
            yield Flow(
                Table.ARRIVAL,
                VOICE,
                match({"in_port": port, "eth_dst": hop, "eth_type": kind}),
                (SetField(TENANT, ground.tenants[part.tenant]), SetField(CAME_FROM, FROM_NODE)),
                Table.TRACK,
            )


def trunk_flows(part: VlanTrunk, ground: FlowContext) -> Iterator[Flow]:
    """What other nodes send to this one by the uplinks belongs to the tenant whose network has the tag."""
    if ground.trunk:
        known = introduction(ground.tenants[part.tenant], 0, kind=FROM_WIRE)
        for kind in ETHER_TYPES.values():
            conditions = {**from_wire(part.number, ground), "eth_dst": mac_number(overlay_mac(ground.vtep))}
            yield Flow(
                Table.ARRIVAL, WIRED + 1, match({**conditions, "eth_type": kind}), (PopVlan(), *known), Table.TRACK
            )


def from_wire(number: int, ground: FlowContext) -> Conditions:
    """A frame from the uplinks with the tag of a network."""
    return {"in_port": ground.trunk, "vlan_vid": _ANY_TAG[0] | vlan_tag(number)}


def remote_flows(part: RemoteRoute, ground: FlowContext) -> Iterator[Flow]:
    """The way to addresses on another node."""
    tenant = ground.tenants[part.tenant]
    yield neighbour({TENANT: tenant}, part.prefix, priority=part.prefix.length + 1)
    if way := way_beyond(part.vni, ground):
        conditions = {TENANT: tenant, **to(part.prefix)}
        actions = sent_to_node(part.vtep, way, ground)
        yield Flow(Table.ROUTE, part.prefix.length + 1, match(conditions), actions, Table.SERVICE)


class Beyond(NamedTuple):
    """How frames of a network leave the node: by a port, with what is done to them before, and what is behind it."""

    port: int
    wrapping: tuple[Action, ...]
    kind: int


def way_beyond(number: int, ground: FlowContext) -> Beyond | None:
    """The way to other nodes for a network of a `wire_number`; nothing where there is none."""
    if tag := vlan_tag(number):
        wrapping = PushVlan(), SetField("vlan_vid", _ANY_TAG[0] | tag)
        return Beyond(ground.trunk, wrapping, FROM_WIRE) if ground.trunk else None
    port = ground.ports.get(overlay_name(number))
    return Beyond(port, (), FROM_NODE) if port else None


def sent_to_node(vtep: str, way: Beyond, ground: FlowContext, *, on_segment: bool = False) -> tuple[Action, ...]:
    """One hop further, to the node whose tunnels end at an address."""
    other = parse_address(vtep, field="vtep")
    # A group's MAC would be flooded by whatever switches frames between uplinks, or on a segment.
    hop = overlay_mac(other) if on_segment or way.kind == FROM_WIRE else overlay_hop_mac(other)
    source, target = mac_number(overlay_mac(ground.vtep)), mac_number(hop)
    return *sent_on(source=source, target=target, port=way.port, kind=way.kind), *way.wrapping


def port_flows(part: Port, ground: FlowContext) -> Iterator[Flow]:
    """A workload speaks with its own MAC and addresses only, and is reached at them."""
    port = ground.ports.get(part.interface)
    if not port:
        return
    tenant, mac = ground.tenants[part.tenant], mac_number(part.mac)
    known = introduction(tenant, part.segment, kind=FROM_WORKLOAD)
    speaks: Conditions = {"in_port": port, "eth_src": mac}
    yield Flow(Table.ARRIVAL, _NOBODY, match({"in_port": port}), (SetField(TENANT, tenant), *refused(SPOOFED)))
    for address in part.addresses:
        yield Flow(Table.ARRIVAL, VOICE, match({**speaks, **_from(address)}), known, Table.TRACK)
        solicits = {**speaks, **solicitation(address, mac)}
        yield Flow(Table.ARRIVAL, SOLICITS, match(solicits), known, Table.NEIGHBOURS)
        # Who asks for its own address wants to know whether another has it.
        yield Flow(Table.ARRIVAL, _OWN_NAME, match({**solicits, **asked_for(prefix_of(address))}))
        if not part.segment:
            yield neighbour({TENANT: tenant}, prefix_of(address), priority=LOCAL)
            yield Flow(
                Table.ROUTE,
                LOCAL,
                match({TENANT: tenant, **to(prefix_of(address))}),
                sent_on(source=PORT_MAC_NUMBER, target=mac, port=port, kind=FROM_WORKLOAD),
                Table.SERVICE,
            )


def _from(address: Address) -> Conditions:
    return address_condition(address.family, v4="ip_src", v6="ipv6_src", prefix=prefix_of(address))


def whereabouts(tenant: int, segment: int) -> Conditions:
    """A packet of a tenant, on a segment where there is one."""
    return {TENANT: tenant, SEGMENT: segment} if segment else {TENANT: tenant}


def introduction(tenant: int, segment: int, *, kind: int) -> tuple[Action, ...]:
    """What is written of a packet that arrives."""
    where = whereabouts(tenant, segment)
    return (
        *(SetField(name, number) for name, number in where.items() if isinstance(number, int)),
        SetField(CAME_FROM, kind),
    )


def to(prefix: Prefix) -> Conditions:
    return address_condition(prefix.family, v4="ip_dst", v6="ipv6_dst", prefix=prefix)


def sent_on(*, source: int, target: int, port: int, kind: int) -> tuple[Action, ...]:
    """One hop further, to somebody's MAC, by a port that is taken when the packet has been judged."""
    return (
        SetField("eth_src", source),
        SetField("eth_dst", target),
        DecrementTtl(),
        SetField(LEAVES_BY, port),
        SetField(GOES_TO, kind),
    )


def solicitation(address: Address, mac: int) -> Conditions:
    """Somebody who asks, from an address, who has another."""
    if address.family == 4:
        return {"eth_type": ARP, "arp_op": 1, "arp_spa": address.number, "arp_sha": mac}
    return {
        "eth_type": V6,
        "ip_proto": ICMPV6,
        "icmpv6_type": SOLICITATION,
        "icmpv6_code": 0,
        "ipv6_src": address.number,
    }


def asked_for(prefix: Prefix) -> Conditions:
    condition = address_condition(prefix.family, v4="arp_tpa", v6="nd_target", prefix=prefix)
    del condition["eth_type"]
    return condition


def neighbour(whose: Conditions, prefix: Prefix, *, priority: int, mac: int = PORT_MAC_NUMBER) -> Flow:
    """Whoever asks for an address of the prefix is told a MAC: that which every host end has, or somebody's own."""
    asked = {**whose, **asked_for(prefix)}
    if prefix.family == 4:
        return Flow(
            Table.NEIGHBOURS,
            priority,
            match({**asked, "eth_type": ARP, "arp_op": 1}),
            (
                *_back_to_sender(mac),
                SetField("arp_op", 2),
                Move("arp_sha", "arp_tha"),
                SetField("arp_sha", mac),
                Move("arp_tpa", SCRATCH),
                Move("arp_spa", "arp_tpa"),
                Move(SCRATCH, "arp_spa"),
                Output(IN_PORT),
            ),
        )
    conditions = {"eth_type": V6, "ip_proto": ICMPV6, "icmpv6_type": SOLICITATION, "icmpv6_code": 0}
    return Flow(
        Table.NEIGHBOURS,
        priority,
        match({**asked, **conditions}),
        (
            *_back_to_sender(mac),
            Move("ipv6_src", "ipv6_dst"),
            Move("nd_target", "ipv6_src"),
            SetField("icmpv6_type", ADVERTISEMENT),
            # An advertisement's fields can be written only where it is known to be one.
            Resubmit(Table.ADVERTISE),
        ),
    )


def _back_to_sender(mac: int) -> tuple[Action, ...]:
    return Move("eth_src", "eth_dst"), SetField("eth_src", mac)
