"""How a connection is judged, as flows (pure): the same parts and the same order as on linux (docs/design/policy.md).

A connection is judged by its two ends, whichever packet of it comes: the tracker knows its first packet's source, who
asks, and its target, who answers. Every packet meets the rows of the moment, so a rule that goes takes its connections
along; the switch itself remembers what became of packets that look alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.netns.nft.policy_chains import NOT_READY, TRANSIT, UNJUDGED, UNKNOWN
from weft.adapters.ovs.openflow.actions import Action, Controller, Move, SetField
from weft.adapters.ovs.openflow.fields import IS_LATER_PIECE, match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    ETHER_TYPES,
    INVALID,
    REPLY,
    TRACKED,
    Conditions,
    FlowContext,
    address_condition,
    blocks,
    has_connection,
    prefix_of,
    refused,
)
from weft.adapters.ovs.pipeline.tables import (
    ANSWERS,
    ASKS,
    CAME_FROM,
    FROM_NODE,
    FROM_WORKLOAD,
    GOES_TO,
    OUTCOME,
    PORT,
    PROTOCOL,
    SEGMENT,
    TENANT,
    Table,
)
from weft.domain.addresses import BITS
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Prefix, TenantNetns
from weft.domain.policy.model.protocols import PORTED, SCTP
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import (
    UNKNOWN_IDENTITY,
    VERDICT_DENY,
    WORKLOAD,
    CidrIdentity,
    IpIdentity,
    PolicyEntry,
    VerdictCounter,
)

_PORT_BITS = 16
# For each end of a connection: where its number is looked up, where it is kept, by which fields, and what follows.
_ENDS = (
    (Table.ASKS, ASKS, "ct_nw_src", "ct_ipv6_src", Table.ANSWERS),
    (Table.ANSWERS, ANSWERS, "ct_nw_dst", "ct_ipv6_dst", Table.PLACES),
)
_WHO, _WHERE, _NOBODY = 3, 2, 1
# Priorities in `SERVICE`.
ASKED_OF_SPACE, _SCTP, _PORTED, _UNPORTED = 4, 3, 2, 1
# Where packets of SCTP tell it, by their direction: the switch's own tracker takes all between two ends for one.
_SCTP_PORTS = {0: "sctp_dst", REPLY: "sctp_src"}

# For each direction: where its rows are, where the local and the remote number are, and what follows.
_LOOKUPS = {
    Direction.EGRESS: (Table.EGRESS, ASKS, ANSWERS, Table.EGRESS_MET),
    Direction.INGRESS: (Table.INGRESS, ANSWERS, ASKS, Table.INGRESS_MET),
}
# Of a connection: the numbers of who speaks and who hears, and the `ct_state` of its packets.
_DIRECTIONS = (
    (ASKS, ANSWERS, (TRACKED, TRACKED | REPLY)),
    (ANSWERS, ASKS, (TRACKED | REPLY, TRACKED | REPLY)),
)
# What follows an outcome that lets pass.
_MET = {Table.EGRESS_MET: Table.INGRESS, Table.INGRESS_MET: Table.MARKING}
# Priorities: of a row with a remote number above all others, and of what it says about the service.
_PAIR, _PORT, _PORTS, _PROTOCOL, _ALL = 4, 4, 3, 2, 1

_TRANSIT, _NOT_READY, _FROM_STRANGER, _JUDGED_THERE, _TO_STRANGER, _KNOWN = 60, 50, 45, 40, 30, 1
_FROM_STRANGER_ON_SEGMENT, _TO_STRANGER_ON_SEGMENT = _FROM_STRANGER + 1, _TO_STRANGER + 1


def base_flows() -> Iterator[Flow]:
    """What stands whatever the node has."""
    for kind in ETHER_TYPES.values():
        known: Conditions = {"eth_type": kind, "ct_state": has_connection()}
        note: Action = Move("ct_nw_proto", PROTOCOL)
        yield Flow(Table.SERVICE, _UNPORTED, match(known), (note,), Table.ASKS)
        for protocol in PORTED:
            conditions = {**known, "ct_nw_proto": protocol}
            yield Flow(Table.SERVICE, _PORTED, match(conditions), (note, Move("ct_tp_dst", PORT)), Table.ASKS)
        for is_reply, field in _SCTP_PORTS.items():
            spoken = {**known, "ct_state": (TRACKED | is_reply, TRACKED | INVALID | REPLY), "ip_proto": SCTP}
            yield Flow(Table.SERVICE, _SCTP, match(spoken), (note, Move(field, PORT)), Table.ASKS)
        # They have no port to be judged by, and do not leave without the first piece, which has.
        later: Conditions = {"eth_type": kind, "ip_frag": IS_LATER_PIECE}
        yield Flow(Table.SERVICE, 4, match(later), (), Table.MARKING)
    for table, _, _, _, then in _ENDS:
        yield Flow(table, _NOBODY, (), (), then)
    yield Flow(Table.PLACES, _KNOWN, (), (), Table.EGRESS)
    yield Flow(Table.EGRESS, 0, (), (), Table.INGRESS)
    yield Flow(Table.INGRESS, 0, (), (), Table.MARKING)
    for table, then in _MET.items():
        yield Flow(table, 1, match({OUTCOME: (VERDICT_DENY, VERDICT_DENY)}), (Controller(),))
        yield Flow(table, 0, (), (), then)


def space_flows(part: TenantNetns, ground: FlowContext) -> Iterator[Flow]:
    """What is decided by where a tenant's packets come from and go to; each reason to drop is counted by itself."""
    tenant: Conditions = {TENANT: ground.tenants[part.tenant]}
    yield Flow(Table.PLACES, _TRANSIT, match({**tenant, CAME_FROM: FROM_NODE, GOES_TO: FROM_NODE}), refused(TRANSIT))
    for speaks, hears, direction in _DIRECTIONS:
        along: Conditions = {**tenant, "ct_state": direction}
        for place, who in ((CAME_FROM, speaks), (GOES_TO, hears)):
            nobodys = {**along, place: FROM_WORKLOAD, who: (0, WORKLOAD)}
            yield Flow(Table.PLACES, _NOT_READY, match(nobodys), refused(NOT_READY))
        from_stranger = {**along, CAME_FROM: FROM_NODE, speaks: (UNKNOWN_IDENTITY, UNKNOWN_IDENTITY)}
        yield Flow(Table.PLACES, _JUDGED_THERE, match(from_stranger), (), Table.MARKING)
        to_stranger = {**along, GOES_TO: FROM_NODE, hears: (UNKNOWN_IDENTITY, UNKNOWN_IDENTITY)}
        for kind in ETHER_TYPES.values():
            for hops in (UNJUDGED, UNJUDGED - 1):
                # Two nodes that know one end each judge nothing.
                unjudged = {**from_stranger, "eth_type": kind, "nw_ttl": hops}
                yield Flow(Table.PLACES, _FROM_STRANGER, match(unjudged), refused(UNKNOWN))
            sent_on = {**to_stranger, "eth_type": kind}
            yield Flow(Table.PLACES, _TO_STRANGER, match(sent_on), (SetField("nw_ttl", UNJUDGED),), Table.MARKING)


def segment_flows(part: Segment, ground: FlowContext) -> Iterator[Flow]:
    """On a segment nobody is passed on to be judged elsewhere: who is found there is known."""
    whose: Conditions = {TENANT: ground.tenants[part.tenant], SEGMENT: part.number}
    for speaks, hears, direction in _DIRECTIONS:
        along: Conditions = {**whose, "ct_state": direction}
        from_stranger = {**along, CAME_FROM: FROM_NODE, speaks: (UNKNOWN_IDENTITY, UNKNOWN_IDENTITY)}
        yield Flow(Table.PLACES, _FROM_STRANGER_ON_SEGMENT, match(from_stranger), (), Table.MARKING)
        to_stranger = {**along, GOES_TO: FROM_NODE, hears: (UNKNOWN_IDENTITY, UNKNOWN_IDENTITY)}
        yield Flow(Table.PLACES, _TO_STRANGER_ON_SEGMENT, match(to_stranger), refused(UNKNOWN))


def who_flows(part: IpIdentity, ground: FlowContext) -> Iterator[Flow]:
    yield from _number(prefix_of(part.address), part.number, tenant=ground.tenants[part.tenant], priority=_WHO)


def where_flows(part: CidrIdentity, ground: FlowContext) -> Iterator[Flow]:
    family, bits = part.range.family, BITS[part.range.family]
    for base, mask in blocks(part.range.first, part.range.last, bits=bits):
        prefix = Prefix(family, base, mask.bit_count())
        yield from _number(prefix, part.number, tenant=ground.tenants[part.tenant], priority=_WHERE)


def _number(prefix: Prefix, number: int, *, tenant: int, priority: int) -> Iterator[Flow]:
    for table, register, v4, v6, then in _ENDS:
        conditions = {
            TENANT: tenant,
            "ct_state": has_connection(),
            **address_condition(prefix.family, v4=v4, v6=v6, prefix=prefix),
        }
        yield Flow(table, priority, match(conditions), (SetField(register, number),), then)


def row_flows(part: PolicyEntry, ground: FlowContext) -> Iterator[Flow]:
    table, local, remote, then = _LOOKUPS[part.direction]
    conditions: Conditions = {TENANT: ground.tenants[part.tenant], local: part.local}
    priority = 0
    if part.remote is not None:
        conditions[remote] = part.remote
        priority += _PAIR
    if part.protocol is not None:
        conditions[PROTOCOL] = part.protocol
    actions = (SetField(OUTCOME, part.outcome),)
    if part.ports is None:
        priority += _ALL if part.protocol is None else _PROTOCOL
        yield Flow(table, priority, match(conditions), actions, then)
    elif part.protocol in PORTED:
        first, last = part.ports
        priority += _PORT if first == last else _PORTS
        for port, mask in blocks(first, last, bits=_PORT_BITS):
            wanted = {**conditions, PORT: (port, mask | 0xFFFF0000)}
            yield Flow(table, priority, match(wanted), actions, then)


def tally_flows(part: VerdictCounter, ground: FlowContext) -> Iterator[Flow]:
    for table, then in _MET.items():
        conditions = {TENANT: ground.tenants[part.tenant], OUTCOME: part.outcome}
        is_refused = bool(part.outcome & VERDICT_DENY)
        yield Flow(table, 2, match(conditions), (Controller(),) if is_refused else (), None if is_refused else then)
