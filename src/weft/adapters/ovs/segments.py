"""Bridge mode as flows (pure): a network is a segment, on which everyone is found by MAC (docs/design/bridge.md).

What is sent to somebody's MAC must be for one of its addresses too: policy judges by these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.adapters.linux.facts import overlay_name
from weft.adapters.linux.voices import link_local
from weft.adapters.ovs.actions import Action, Output, SetField
from weft.adapters.ovs.fields import match
from weft.adapters.ovs.flows import Flow
from weft.adapters.ovs.forwarding import (
    ADVERTISEMENT,
    GATEWAY,
    ICMPV6,
    LOCAL,
    PORT_MAC_NUMBER,
    SOLICITATION,
    SOLICITS,
    introduction,
    neighbour,
    sent_on,
    solicitation,
    to,
    whereabouts,
)
from weft.adapters.ovs.ground import ARP, ETHER_TYPES, V6, Conditions, Ground, mac_number, prefix_of
from weft.adapters.ovs.tables import FROM_NODE, FROM_WORKLOAD, GOES_TO, LEAVES_BY, Table
from weft.domain.addresses import Address
from weft.domain.nodeview import Overlay, Port
from weft.domain.segments import Segment, Station

_FLOODED = (GATEWAY + LOCAL) // 2
"""Priority in `NEIGHBOURS`: the node answers for itself, and for others only where nothing is flooded."""
_BEYOND = 700
"""Priority of who is on another node. It is not that of who is here: an address may be told of in both places while
it moves."""
_FROM_OVERLAY, _TO_ALL = 15, 1
_MANY = 1 << 40, 1 << 40
"""A MAC that is a group's."""
_ADVERTISES: Conditions = {"eth_type": V6, "ip_proto": ICMPV6, "icmpv6_type": ADVERTISEMENT, "icmpv6_code": 0}
_SOLICITS: Conditions = {"eth_type": V6, "ip_proto": ICMPV6, "icmpv6_type": SOLICITATION, "icmpv6_code": 0}


def port_flows(part: Port, ground: Ground) -> Iterator[Flow]:
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
    yield from _member(whose, mac, part.addresses, port=port, kind=FROM_WORKLOAD, priority=LOCAL)


def station_flows(part: Station, ground: Ground) -> Iterator[Flow]:
    """A workload of another node on a segment."""
    if port := ground.ports.get(overlay_name(part.vni)):
        whose = whereabouts(ground.tenants[part.tenant], part.vni)
        mac = mac_number(part.mac)
        yield from _member(whose, mac, part.addresses, port=port, kind=FROM_NODE, priority=_BEYOND)


def _member(
    whose: Conditions, mac: int, addresses: Iterable[Address], *, port: int, kind: int, priority: int
) -> Iterator[Flow]:
    """Who is on a segment is known to all of it, and reached behind a port."""
    yield Flow(Table.SPREAD, priority, match({**whose, "eth_dst": mac}), (Output(port),))
    straight = SetField(LEAVES_BY, port), SetField(GOES_TO, kind)
    # Who has an old MAC of somebody sends to the gateway what need not go there.
    helped_on = sent_on(source=PORT_MAC_NUMBER, target=mac, port=port, kind=kind)
    for address in addresses:
        yield neighbour(whose, prefix_of(address), priority=priority, mac=mac)
        for spoken_to, actions in ((mac, straight), (PORT_MAC_NUMBER, helped_on)):
            conditions = {**whose, **to(prefix_of(address)), "eth_dst": spoken_to}
            yield Flow(Table.ROUTE, priority, match(conditions), actions, Table.SERVICE)


def _claim(address: Address, mac: int) -> Conditions:
    """Somebody who says, asked or not, that it has an address."""
    if address.family == 4:
        return {"eth_type": ARP, "arp_op": 2, "arp_spa": address.number, "arp_sha": mac}
    return {**_ADVERTISES, "ipv6_src": address.number, "nd_target": address.number}


def gathering_flows(segment: Segment, members: Iterable[Port | Overlay], ground: Ground) -> Iterator[Flow]:
    """What depends on who is on the segment: what comes by its overlay, and what is flooded."""
    if segment.tenant not in ground.tenants:
        return
    tenant = ground.tenants[segment.tenant]
    whose = whereabouts(tenant, segment.number)
    ports = {_name(member): number for member in members if (number := ground.ports.get(_name(member)))}
    if overlay := ports.get(overlay_name(segment.number)):
        yield from _overlay_flows(overlay, introduction=introduction(tenant, segment.number, kind=FROM_NODE))
    if segment.floods:
        for asks in ({"eth_type": ARP, "arp_op": 1}, _SOLICITS):
            yield Flow(Table.NEIGHBOURS, _FLOODED, match({**whose, **asks}), (), Table.SPREAD)
        everyone = tuple(Output(port) for port in sorted(ports.values()))
        yield Flow(Table.SPREAD, _TO_ALL, match({**whose, "eth_dst": _MANY}), everyone)


def _overlay_flows(overlay: int, *, introduction: tuple[Action, ...]) -> Iterator[Flow]:
    """Other nodes send on what their own workloads may say."""
    for kind in ETHER_TYPES.values():
        conditions: Conditions = {"in_port": overlay, "eth_type": kind}
        yield Flow(Table.ARRIVAL, _FROM_OVERLAY, match(conditions), introduction, Table.TRACK)
    about_addresses: Iterable[Conditions] = ({"eth_type": ARP}, _SOLICITS, _ADVERTISES)
    for words in about_addresses:
        yield Flow(Table.ARRIVAL, SOLICITS, match({"in_port": overlay, **words}), introduction, Table.SPREAD)


def _name(member: Port | Overlay) -> str:
    return member.interface if isinstance(member, Port) else overlay_name(member.vni)
