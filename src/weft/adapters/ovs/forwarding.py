"""Who may speak, who is where, and how packets get there in routing mode: parts of the node view as flows (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.linux.facts import PORT_MAC, overlay_hop_mac, overlay_mac, overlay_name
from weft.adapters.ovs.actions import (
    IN_PORT,
    Action,
    DecrementTtl,
    Move,
    Output,
    OutputRegister,
    Resubmit,
    SetField,
    Track,
)
from weft.adapters.ovs.fields import match
from weft.adapters.ovs.flows import Flow
from weft.adapters.ovs.ground import (
    ARP,
    ETHER_TYPES,
    INVALID,
    NEW,
    TRACKED,
    V6,
    Conditions,
    Ground,
    address_condition,
    mac_number,
    prefix_of,
)
from weft.adapters.ovs.tables import (
    CAME_FROM,
    FROM_NODE,
    FROM_WORKLOAD,
    GOES_TO,
    LEAVES_BY,
    SCRATCH,
    TENANT,
    Table,
)
from weft.domain.addresses import Address, parse_address
from weft.domain.nodeview import Gateway, Overlay, Port, Prefix, Remote, Shape, Space

_ICMP, _ICMPV6 = 1, 58
_SOLICITATION, _ADVERTISEMENT, _ROUTER, _REDIRECT = 135, 136, 134, 137
_ECHOES = {4: ("icmp_type", 8, 0, _ICMP), 6: ("icmpv6_type", 128, 129, _ICMPV6)}
"""By family: the field, a request's type, an answer's, the protocol."""
_HOPS = 64
_LINK_LOCAL = (0xFE80 << 112, 0xFFC0 << 112)
_ROUTER_SOLICITED_OVERRIDE = 0xE0000000
_SOURCE = {4: "ip_src", 6: "ipv6_src"}
_TARGET = {4: "ip_dst", 6: "ipv6_dst"}

# Priorities in `ARRIVAL`.
_REFUSED, _OWN_NAME, _SOLICITS, _VOICE, _NOISE, _NOBODY = 60, 50, 40, 30, 20, 10
_NO_CONNECTION, _GATEWAY, _LOCAL = 1000, 900, 800
"""Priorities in `ROUTE`; below them the length of a remote prefix is its priority."""

PORT_MAC_NUMBER = mac_number(PORT_MAC)


def base_flows() -> Iterator[Flow]:
    """What stands whatever the node has."""
    for kind in (_ROUTER, _REDIRECT):
        yield Flow(Table.ARRIVAL, _REFUSED, match({"eth_type": V6, "ip_proto": _ICMPV6, "icmpv6_type": kind}))
    for source in (0, _LINK_LOCAL):
        # What every kernel says on a new link, and nobody has to hear.
        yield Flow(Table.ARRIVAL, _NOISE, match({"eth_type": V6, "ip_proto": _ICMPV6, "ipv6_src": source}))
    yield Flow(
        Table.ADVERTISE,
        1,
        match({"eth_type": V6, "ip_proto": _ICMPV6, "icmpv6_type": _ADVERTISEMENT, "icmpv6_code": 0}),
        (
            SetField("nd_options_type", 2),
            SetField("nd_tll", PORT_MAC_NUMBER),
            SetField("nd_reserved", _ROUTER_SOLICITED_OVERRIDE),
            Output(IN_PORT),
        ),
    )
    yield Flow(Table.MARKING, 0, (), (), Table.LEAVE)
    for kind in ETHER_TYPES.values():
        yield Flow(Table.TRACK, 1, match({"eth_type": kind}), (Track(TENANT, Table.ROUTE),))
        yield Flow(
            Table.LEAVE,
            2,
            match({"eth_type": kind, "ct_state": (NEW | TRACKED, NEW | TRACKED)}),
            (Track(TENANT, commit=True), OutputRegister(LEAVES_BY)),
        )
        yield Flow(Table.LEAVE, 1, match({"eth_type": kind}), (OutputRegister(LEAVES_BY),))


def space_flows(part: Space, ground: Ground) -> Iterator[Flow]:
    """Nothing of the tenant passes that belongs to no connection."""
    conditions: Conditions = {TENANT: ground.tenants[part.tenant], "ct_state": (INVALID, INVALID)}
    yield Flow(Table.ROUTE, _NO_CONNECTION, match(conditions))


def gateway_flows(part: Gateway, ground: Ground) -> Iterator[Flow]:
    """The gateway is known to its neighbours, and answers to echo requests of workloads."""
    tenant, address = ground.tenants[part.tenant], part.address
    yield _neighbour(tenant, prefix_of(address), priority=_GATEWAY)
    field, request, answer, protocol = _ECHOES[address.family]
    yield Flow(
        Table.ROUTE,
        _GATEWAY,
        match(
            {
                TENANT: tenant,
                CAME_FROM: FROM_WORKLOAD,
                **_to(prefix_of(address)),
                "ip_proto": protocol,
                field: request,
            }
        ),
        (
            *_back_to_sender(),
            Move(_SOURCE[address.family], _TARGET[address.family]),
            SetField(_SOURCE[address.family], address.number),
            SetField(field, answer),
            SetField("nw_ttl", _HOPS),
            Output(IN_PORT),
        ),
    )


def overlay_flows(part: Overlay, ground: Ground) -> Iterator[Flow]:
    """What other nodes send to this one on the overlay belongs to its tenant."""
    if port := ground.ports.get(overlay_name(part.vni)):
        hop = mac_number(overlay_hop_mac(ground.vtep))
        for kind in ETHER_TYPES.values():
            yield Flow(
                Table.ARRIVAL,
                _VOICE,
                match({"in_port": port, "eth_dst": hop, "eth_type": kind}),
                (SetField(TENANT, ground.tenants[part.tenant]), SetField(CAME_FROM, FROM_NODE)),
                Table.TRACK,
            )


def remote_flows(part: Remote, ground: Ground) -> Iterator[Flow]:
    """The way to addresses on another node."""
    tenant = ground.tenants[part.tenant]
    yield _neighbour(tenant, part.prefix, priority=part.prefix.length + 1)
    if port := ground.ports.get(overlay_name(part.vni)):
        own, hop = overlay_mac(ground.vtep), overlay_hop_mac(parse_address(part.vtep, field="vtep"))
        actions = _sent_on(source=mac_number(own), target=mac_number(hop), port=port, kind=FROM_NODE)
        conditions = {TENANT: tenant, **_to(part.prefix)}
        yield Flow(Table.ROUTE, part.prefix.length + 1, match(conditions), actions, Table.SERVICE)


def port_flows(part: Port, ground: Ground) -> Iterator[Flow]:
    """A workload speaks with its own MAC and addresses only, and is reached at them."""
    port = ground.ports.get(part.interface)
    if not port:
        return
    tenant, mac = ground.tenants[part.tenant], mac_number(part.mac)
    known = (SetField(TENANT, tenant), SetField(CAME_FROM, FROM_WORKLOAD))
    speaks: Conditions = {"in_port": port, "eth_src": mac}
    yield Flow(Table.ARRIVAL, _NOBODY, match({"in_port": port}))
    for address in part.addresses:
        yield Flow(Table.ARRIVAL, _VOICE, match({**speaks, **_from(address)}), known, Table.TRACK)
        solicits = {**speaks, **_solicitation(address, mac)}
        yield Flow(Table.ARRIVAL, _SOLICITS, match(solicits), known, Table.NEIGHBOURS)
        # Who asks for its own address wants to know whether another has it.
        yield Flow(Table.ARRIVAL, _OWN_NAME, match({**solicits, **_asked_for(prefix_of(address))}))
        yield _neighbour(tenant, prefix_of(address), priority=_LOCAL)
        yield Flow(
            Table.ROUTE,
            _LOCAL,
            match({TENANT: tenant, **_to(prefix_of(address))}),
            _sent_on(source=PORT_MAC_NUMBER, target=mac, port=port, kind=FROM_WORKLOAD),
            Table.SERVICE,
        )


def shape_flows(part: Shape, ground: Ground) -> Iterator[Flow]:
    """What a workload sends has the DSCP of its profile; the tunnel's packets get it from those inside."""
    port = ground.ports.get(part.interface)
    if port and part.dscp:
        for kind in ETHER_TYPES.values():
            conditions: Conditions = {"in_port": port, "eth_type": kind}
            yield Flow(Table.MARKING, 1, match(conditions), (SetField("ip_dscp", part.dscp),), Table.LEAVE)


def _from(address: Address) -> Conditions:
    return address_condition(address.family, v4="ip_src", v6="ipv6_src", prefix=prefix_of(address))


def _to(prefix: Prefix) -> Conditions:
    return address_condition(prefix.family, v4="ip_dst", v6="ipv6_dst", prefix=prefix)


def _sent_on(*, source: int, target: int, port: int, kind: int) -> tuple[Action, ...]:
    """One hop further, to somebody's MAC, by a port that is taken when the packet has been judged."""
    return (
        SetField("eth_src", source),
        SetField("eth_dst", target),
        DecrementTtl(),
        SetField(LEAVES_BY, port),
        SetField(GOES_TO, kind),
    )


def _solicitation(address: Address, mac: int) -> Conditions:
    """Somebody who asks, from an address, who has another."""
    if address.family == 4:
        return {"eth_type": ARP, "arp_op": 1, "arp_spa": address.number, "arp_sha": mac}
    return {
        "eth_type": V6,
        "ip_proto": _ICMPV6,
        "icmpv6_type": _SOLICITATION,
        "icmpv6_code": 0,
        "ipv6_src": address.number,
    }


def _asked_for(prefix: Prefix) -> Conditions:
    condition = address_condition(prefix.family, v4="arp_tpa", v6="nd_target", prefix=prefix)
    del condition["eth_type"]
    return condition


def _neighbour(tenant: int, prefix: Prefix, *, priority: int) -> Flow:
    """Whoever asks for an address of the prefix is told the MAC that every host end has."""
    asked = {TENANT: tenant, **_asked_for(prefix)}
    if prefix.family == 4:
        return Flow(
            Table.NEIGHBOURS,
            priority,
            match({**asked, "eth_type": ARP, "arp_op": 1}),
            (
                *_back_to_sender(),
                SetField("arp_op", 2),
                Move("arp_sha", "arp_tha"),
                SetField("arp_sha", PORT_MAC_NUMBER),
                Move("arp_tpa", SCRATCH),
                Move("arp_spa", "arp_tpa"),
                Move(SCRATCH, "arp_spa"),
                Output(IN_PORT),
            ),
        )
    conditions = {"eth_type": V6, "ip_proto": _ICMPV6, "icmpv6_type": _SOLICITATION, "icmpv6_code": 0}
    return Flow(
        Table.NEIGHBOURS,
        priority,
        match({**asked, **conditions}),
        (
            *_back_to_sender(),
            Move("ipv6_src", "ipv6_dst"),
            Move("nd_target", "ipv6_src"),
            SetField("icmpv6_type", _ADVERTISEMENT),
            # An advertisement's fields can be written only where it is known to be one.
            Resubmit(Table.ADVERTISE),
        ),
    )


def _back_to_sender() -> tuple[Action, ...]:
    return Move("eth_src", "eth_dst"), SetField("eth_src", PORT_MAC_NUMBER)
