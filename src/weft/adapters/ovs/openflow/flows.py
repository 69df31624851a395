"""Flows: as values, as OpenFlow 1.4 flow mods, and decoded from flow statistics."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weft.adapters.ovs.openflow.actions import Action, Output, SetField, Unknown, decode_actions, encode_actions
from weft.adapters.ovs.openflow.constants import (
    OFP_NO_BUFFER,
    OFPFC_ADD,
    OFPFC_DELETE_STRICT,
    OFPG_ANY,
    OFPIT_APPLY_ACTIONS,
    OFPIT_GOTO_TABLE,
    OFPIT_METER,
    OFPP_ANY,
    OFPTT_ALL,
)
from weft.adapters.ovs.openflow.fields import FIELDS, Match, decode_match, encode_match, format_match, unpack
from weft.domain.errors import DatapathFault

# The upper half of the cookie marks our flows, so that a restarted agent finds them.
OWNER = 0x77656674 << 32
OWNER_MASK = 0xFFFFFFFF << 32

_MOD = struct.Struct("!QQBBHHHIIIHH")
_STATS_REQUEST = struct.Struct("!B3xII4xQQ")
_STATS = struct.Struct("!HBxIIHHHHH2xQQQ")
_INSTRUCTION = struct.Struct("!HH")
_GOTO_STRUCT = struct.Struct("!HHB3x")
_APPLY_STRUCT = struct.Struct("!HH4x")
_METER_STRUCT = struct.Struct("!HHI")
_RESERVED_PORTS = 0xFFFFFF00
# Fields whose values are prerequisites of other fields.
_PREREQUISITES = frozenset({"eth_type", "ip_proto", "icmpv6_type", "ct_state", "ct_nw_proto"})


class FlowKey(NamedTuple):
    """Identifies a flow: adding one with the same key replaces it."""

    table: int
    priority: int
    match: Match = ()


class Flow(msgspec.Struct, frozen=True, gc=False):
    """A flow entry: match, priority, actions and next table."""

    table: int
    priority: int
    match: Match = ()
    actions: tuple[Action, ...] = ()
    # The next table (OFPIT_GOTO_TABLE), or None.
    goto: int | None = None
    # The meter applied before the actions, or 0.
    meter: int = 0

    @property
    def key(self) -> FlowKey:
        return FlowKey(self.table, self.priority, self.match)

    @property
    def shape(self) -> tuple[object, ...]:
        """What decides whether a switch accepts a flow: flows of one shape differ only in values."""
        conditions = (
            each if each.name in _PREREQUISITES else (each.name, each.mask == FIELDS[each.name].exact_mask)
            for each in self.match
        )
        return (self.table, self.goto, bool(self.meter), *conditions, *map(_shape_of, self.actions))

    def __str__(self) -> str:
        """Format the flow as ovs-ofctl reads it."""
        conditions = f",{format_match(self.match)}" if self.match else ""
        meter = [f"meter:{self.meter}"] if self.meter else []
        actions = [*meter, *map(str, self.actions), *([] if self.goto is None else [f"goto_table:{self.goto}"])]
        return f"table={self.table},priority={self.priority}{conditions},actions={','.join(actions) or 'drop'}"


def _shape_of(action: Action) -> Action | str | int:
    """Reduce an action to what matters for acceptance: no port number and no field value."""
    match action:
        case SetField():
            return action.name
        case Output():
            return max(action.port, _RESERVED_PORTS)
        case _:
            return action


class FlowCount(NamedTuple):
    """A flow in the switch, its cookie and its packet counter."""

    flow: Flow
    cookie: int
    packets: int


def add_flow(flow: Flow) -> bytes:
    """Encode OFPFC_ADD: replaces a flow with the same key."""
    return _mod(OFPFC_ADD, flow.key, cookie=OWNER, mask=0) + _instructions(flow)


def delete_flow(key: FlowKey) -> bytes:
    """Encode OFPFC_DELETE_STRICT for one of our flows; idempotent."""
    return _mod(OFPFC_DELETE_STRICT, key, cookie=OWNER, mask=OWNER_MASK)


def _mod(command: int, key: FlowKey, *, cookie: int, mask: int) -> bytes:
    head = _MOD.pack(cookie, mask, key.table, command, 0, 0, key.priority, OFP_NO_BUFFER, OFPP_ANY, OFPG_ANY, 0, 0)
    return head + encode_match(key.match)


def _instructions(flow: Flow) -> bytes:
    actions = encode_actions(flow.actions)
    apply = _APPLY_STRUCT.pack(OFPIT_APPLY_ACTIONS, _APPLY_STRUCT.size + len(actions)) + actions if actions else b""
    meter = _METER_STRUCT.pack(OFPIT_METER, _METER_STRUCT.size, flow.meter) if flow.meter else b""
    return (
        meter
        + apply
        + (b"" if flow.goto is None else _GOTO_STRUCT.pack(OFPIT_GOTO_TABLE, _GOTO_STRUCT.size, flow.goto))
    )


def flows_request() -> bytes:
    """Encode a flow statistics request for all of our flows."""
    return _STATS_REQUEST.pack(OFPTT_ALL, OFPP_ANY, OFPG_ANY, OWNER, OWNER_MASK) + encode_match(())


def decode_flows(data: bytes) -> Iterator[FlowCount]:
    """Decode the flows of one multipart reply."""
    at = 0
    while at < len(data):
        length, table, _, _, priority, _, _, _, _, cookie, packets, _ = unpack(_STATS, data, at)
        if length < _STATS.size or at + length > len(data):
            raise DatapathFault("openflow: bad flow length")
        entry = data[at + _STATS.size : at + length]
        at += length
        match, used = decode_match(entry)
        actions, goto, meter = _decode_instructions(entry[used:])
        yield FlowCount(Flow(table, priority, match, actions, goto, meter), cookie, packets)


def _decode_instructions(data: bytes) -> tuple[tuple[Action, ...], int | None, int]:
    actions: tuple[Action, ...] = ()
    goto, meter, at = None, 0, 0
    while at < len(data):
        kind, length = unpack(_INSTRUCTION, data, at)
        if length < 8 or at + length > len(data):
            raise DatapathFault("openflow: bad instruction length")
        body = data[at : at + length]
        at += length
        if kind == OFPIT_APPLY_ACTIONS:
            actions += decode_actions(body[_APPLY_STRUCT.size :])
        elif kind == OFPIT_GOTO_TABLE:
            goto = unpack(_GOTO_STRUCT, body)[2]
        elif kind == OFPIT_METER:
            meter = unpack(_METER_STRUCT, body)[2]
        else:
            actions += (Unknown(body),)
    return actions, goto, meter
