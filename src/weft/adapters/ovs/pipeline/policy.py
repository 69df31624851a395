"""Flows that evaluate network policy (pure), with the same policy map as the linux datapath (docs/design/policy.md).

Policy is evaluated per connection: conntrack gives every packet, of both directions, the source and destination of the
first one. Every packet passes the current entries, so removing a rule also stops the connections it allowed. The
datapath cache of OVS makes that cheap.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.netns.devices import POLICY_DEFERRED_HOP_LIMIT
from weft.adapters.netns.drop_reasons import DROP_ENDPOINT_NOT_READY, DROP_OVERLAY_TRANSIT, DROP_UNKNOWN_IDENTITY
from weft.adapters.ovs.openflow.actions import Action, Controller, Move, SetField
from weft.adapters.ovs.openflow.fields import LATER_FRAGMENT, match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import (
    CS_INVALID,
    CS_REPLY_DIR,
    CS_TRACKED,
    CT_VALID,
    ETHER_TYPES,
    Conditions,
    FlowContext,
    address_condition,
    drop_with_reason,
    host_prefix,
    range_to_masks,
)
from weft.adapters.ovs.pipeline.tables import (
    DST_IDENTITY,
    L4_DST_PORT,
    L4_PROTOCOL,
    LOCAL_WORKLOAD,
    PKT_DESTINATION,
    PKT_SOURCE,
    REMOTE_NODE,
    SEGMENT,
    SRC_IDENTITY,
    TENANT,
    VERDICT,
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
# For source and destination: the lookup table, the register for the identity, the match fields, the next table.
_IDENTITY_LOOKUPS = (
    (Table.SRC_IDENTITY, SRC_IDENTITY, "ct_nw_src", "ct_ipv6_src", Table.DST_IDENTITY),
    (Table.DST_IDENTITY, DST_IDENTITY, "ct_nw_dst", "ct_ipv6_dst", Table.LOCALITY_CHECK),
)
# Priorities of identity lookups: an address wins over a CIDR.
_IP, _CIDR, _NO_IDENTITY = 3, 2, 1
# Priorities in `L4_KEY`.
TO_NETNS, _SCTP, _PORTED, _UNPORTED = 4, 3, 2, 1
# The field with the destination port of an SCTP connection, by direction. The userspace conntrack does not know SCTP
# ports: it takes all associations between two hosts for one connection.
_SCTP_PORTS = {0: "sctp_dst", CS_REPLY_DIR: "sctp_src"}

# For each direction: the table of its entries, the registers of the local and the remote identity, the next table.
_POLICY_LOOKUPS = {
    Direction.EGRESS: (Table.EGRESS_RULE, SRC_IDENTITY, DST_IDENTITY, Table.EGRESS_METRIC),
    Direction.INGRESS: (Table.INGRESS_RULE, DST_IDENTITY, SRC_IDENTITY, Table.INGRESS_METRIC),
}
# For each direction of a connection: the identities of sender and receiver, the `ct_state` of its packets, and the next
# table if this node does not know the sender. Egress was evaluated by the sender's node, which alone knows its rules.
# Ingress is not left to it: a node must not pass the rules of others with addresses that it has made up. A reply needs
# neither, because its connection was opened here.
_DIRECTIONS = (
    (SRC_IDENTITY, DST_IDENTITY, (CS_TRACKED, CS_TRACKED | CS_REPLY_DIR), Table.INGRESS_RULE),
    (DST_IDENTITY, SRC_IDENTITY, (CS_TRACKED | CS_REPLY_DIR, CS_TRACKED | CS_REPLY_DIR), Table.EGRESS_METER),
)
# The table after an allowing verdict.
_NEXT_TABLE = {Table.EGRESS_METRIC: Table.INGRESS_RULE, Table.INGRESS_METRIC: Table.EGRESS_METER}
# Priorities of policy entries: one with a remote identity wins over all without, then the more specific L4 match wins.
_PAIR, _PORT, _PORT_RANGE, _PROTOCOL, _ANY_L4 = 4, 4, 3, 2, 1

# Priorities in `LOCALITY_CHECK`.
_TRANSIT, _NOT_READY, _UNKNOWN_SRC_DEFERRED, _UNKNOWN_SRC, _UNKNOWN_DST, _KNOWN = 60, 50, 45, 40, 30, 1
_UNKNOWN_SRC_ON_SEGMENT, _UNKNOWN_DST_ON_SEGMENT = _UNKNOWN_SRC_DEFERRED + 1, _UNKNOWN_DST + 1
_UNKNOWN = UNKNOWN_IDENTITY, UNKNOWN_IDENTITY


def base_flows() -> Iterator[Flow]:
    """Flows that do not depend on desired state."""
    for ether_type in ETHER_TYPES.values():
        yield from _l4_key_flows(ether_type)
    for table, _, _, _, next_table in _IDENTITY_LOOKUPS:
        yield Flow(table, _NO_IDENTITY, (), (), next_table)
    yield Flow(Table.LOCALITY_CHECK, _KNOWN, (), (), Table.EGRESS_RULE)
    yield Flow(Table.EGRESS_RULE, 0, (), (), Table.INGRESS_RULE)
    yield Flow(Table.INGRESS_RULE, 0, (), (), Table.EGRESS_METER)
    for table, next_table in _NEXT_TABLE.items():
        # A denying verdict must drop even when it has no counter.
        yield Flow(table, 1, match({VERDICT: (VERDICT_DENY, VERDICT_DENY)}), (Controller(),))
        yield Flow(table, 0, (), (), next_table)


def _l4_key_flows(ether_type: int) -> Iterator[Flow]:
    valid: Conditions = {"eth_type": ether_type, "ct_state": CT_VALID}
    load_protocol: Action = Move("ct_nw_proto", L4_PROTOCOL)
    yield Flow(Table.L4_KEY, _UNPORTED, match(valid), (load_protocol,), Table.SRC_IDENTITY)
    for protocol in PORTED:
        actions = load_protocol, Move("ct_tp_dst", L4_DST_PORT)
        yield Flow(Table.L4_KEY, _PORTED, match({**valid, "ct_nw_proto": protocol}), actions, Table.SRC_IDENTITY)
    for direction, field in _SCTP_PORTS.items():
        ct_state = CS_TRACKED | direction, CS_TRACKED | CS_INVALID | CS_REPLY_DIR
        sctp = {**valid, "ct_state": ct_state, "ip_proto": SCTP}
        actions = load_protocol, Move(field, L4_DST_PORT)
        yield Flow(Table.L4_KEY, _SCTP, match(sctp), actions, Table.SRC_IDENTITY)
    # Later fragments have no ports to match. They skip policy, but leave only if the first fragment was allowed.
    later_fragment: Conditions = {"eth_type": ether_type, "ip_frag": LATER_FRAGMENT}
    yield Flow(Table.L4_KEY, TO_NETNS, match(later_fragment), (), Table.EGRESS_METER)


def tenant_flows(item: TenantNetns, context: FlowContext) -> Iterator[Flow]:
    """Locality checks of a tenant. Each drop reason has flows of its own, so that it is counted."""
    tenant: Conditions = {TENANT: context.tenants[item.tenant]}
    transit = {**tenant, PKT_SOURCE: REMOTE_NODE, PKT_DESTINATION: REMOTE_NODE}
    yield Flow(Table.LOCALITY_CHECK, _TRANSIT, match(transit), drop_with_reason(DROP_OVERLAY_TRANSIT))
    for sender, receiver, direction, unknown_next in _DIRECTIONS:
        packets: Conditions = {**tenant, "ct_state": direction}
        for locality, identity in ((PKT_SOURCE, sender), (PKT_DESTINATION, receiver)):
            not_ready = {**packets, locality: LOCAL_WORKLOAD, identity: (0, WORKLOAD)}
            dropped = drop_with_reason(DROP_ENDPOINT_NOT_READY)
            yield Flow(Table.LOCALITY_CHECK, _NOT_READY, match(not_ready), dropped)
        unknown_src = {**packets, PKT_SOURCE: REMOTE_NODE, sender: _UNKNOWN}
        yield Flow(Table.LOCALITY_CHECK, _UNKNOWN_SRC, match(unknown_src), (), unknown_next)
        unknown_dst = {**packets, PKT_DESTINATION: REMOTE_NODE, receiver: _UNKNOWN}
        for ether_type in ETHER_TYPES.values():
            # Two nodes that each know only their own end would defer to each other, and neither would evaluate policy.
            # So a node that defers marks the packet by its TTL. It arrives with or without one more hop.
            for ttl in (POLICY_DEFERRED_HOP_LIMIT, POLICY_DEFERRED_HOP_LIMIT - 1):
                deferred = {**unknown_src, "eth_type": ether_type, "nw_ttl": ttl}
                dropped = drop_with_reason(DROP_UNKNOWN_IDENTITY)
                yield Flow(Table.LOCALITY_CHECK, _UNKNOWN_SRC_DEFERRED, match(deferred), dropped)
            conditions = {**unknown_dst, "eth_type": ether_type}
            defer = (SetField("nw_ttl", POLICY_DEFERRED_HOP_LIMIT),)
            yield Flow(Table.LOCALITY_CHECK, _UNKNOWN_DST, match(conditions), defer, Table.EGRESS_METER)


def segment_flows(item: Segment, context: FlowContext) -> Iterator[Flow]:
    """On a segment no node defers to another: L3Forwarding finds only endpoints that have an identity."""
    segment: Conditions = {TENANT: context.tenants[item.tenant], SEGMENT: item.number}
    for sender, receiver, direction, unknown_next in _DIRECTIONS:
        packets: Conditions = {**segment, "ct_state": direction}
        unknown_src = {**packets, PKT_SOURCE: REMOTE_NODE, sender: _UNKNOWN}
        yield Flow(Table.LOCALITY_CHECK, _UNKNOWN_SRC_ON_SEGMENT, match(unknown_src), (), unknown_next)
        unknown_dst = {**packets, PKT_DESTINATION: REMOTE_NODE, receiver: _UNKNOWN}
        dropped = drop_with_reason(DROP_UNKNOWN_IDENTITY)
        yield Flow(Table.LOCALITY_CHECK, _UNKNOWN_DST_ON_SEGMENT, match(unknown_dst), dropped)


def ip_identity_flows(item: IpIdentity, context: FlowContext) -> Iterator[Flow]:
    tenant = context.tenants[item.tenant]
    yield from _identity_flows(host_prefix(item.address), item.identity, tenant=tenant, priority=_IP)


def cidr_identity_flows(item: CidrIdentity, context: FlowContext) -> Iterator[Flow]:
    family, bits = item.range.family, BITS[item.range.family]
    for base, mask in range_to_masks(item.range.first, item.range.last, bits=bits):
        prefix = Prefix(family, base, mask.bit_count())
        yield from _identity_flows(prefix, item.identity, tenant=context.tenants[item.tenant], priority=_CIDR)


def _identity_flows(prefix: Prefix, identity: int, *, tenant: int, priority: int) -> Iterator[Flow]:
    for table, register, v4, v6, next_table in _IDENTITY_LOOKUPS:
        conditions = {
            TENANT: tenant,
            "ct_state": CT_VALID,
            **address_condition(prefix.family, v4=v4, v6=v6, prefix=prefix),
        }
        yield Flow(table, priority, match(conditions), (SetField(register, identity),), next_table)


def policy_entry_flows(item: PolicyEntry, context: FlowContext) -> Iterator[Flow]:
    table, local, remote, next_table = _POLICY_LOOKUPS[item.direction]
    conditions: Conditions = {TENANT: context.tenants[item.tenant], local: item.local}
    priority = 0
    if item.remote is not None:
        conditions[remote] = item.remote
        priority += _PAIR
    if item.protocol is not None:
        conditions[L4_PROTOCOL] = item.protocol
    actions = (SetField(VERDICT, item.verdict_id),)
    if item.ports is None:
        priority += _ANY_L4 if item.protocol is None else _PROTOCOL
        yield Flow(table, priority, match(conditions), actions, next_table)
    elif item.protocol in PORTED:
        first, last = item.ports
        priority += _PORT if first == last else _PORT_RANGE
        for port, mask in range_to_masks(first, last, bits=_PORT_BITS):
            # A register has 32 bits, so the mask must cover the upper half too.
            l4 = {**conditions, L4_DST_PORT: (port, mask | 0xFFFF0000)}
            yield Flow(table, priority, match(l4), actions, next_table)


def verdict_counter_flows(item: VerdictCounter, context: FlowContext) -> Iterator[Flow]:
    for table, next_table in _NEXT_TABLE.items():
        conditions = match({TENANT: context.tenants[item.tenant], VERDICT: item.verdict_id})
        if item.verdict_id & VERDICT_DENY:
            yield Flow(table, 2, conditions, (Controller(),))
        else:
            yield Flow(table, 2, conditions, (), next_table)
