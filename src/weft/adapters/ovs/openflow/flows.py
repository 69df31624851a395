"""Flows as values, as OpenFlow 1.4 messages, and out of the switch's answers."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weft.adapters.ovs.openflow.actions import Action, Output, SetField, Unknown, decode_actions, encode_actions
from weft.adapters.ovs.openflow.fields import FIELDS, Match, decode_match, encode_match, told, unpack
from weft.domain.errors import DatapathFault

# The cookie of every flow of ours: a process with no memory knows them by it.
OWNER = 0x77656674 << 32
OWNER_MASK = 0xFFFFFFFF << 32

ADD, DELETE_STRICT = 0, 4
_ALL_TABLES = 0xFF
_ANY = 0xFFFFFFFF
_MOD = struct.Struct("!QQBBHHHIIIHH")
_STATS_REQUEST = struct.Struct("!B3xII4xQQ")
_STATS = struct.Struct("!HBxIIHHHHH2xQQQ")
_INSTRUCTION = struct.Struct("!HH")
_GOTO_FORM = struct.Struct("!HHB3x")
_APPLY_FORM = struct.Struct("!HH4x")
_METER_FORM = struct.Struct("!HHI")
_GOTO, _APPLY, _METER = 1, 4, 6
_RESERVED_PORTS = 0xFFFFFF00
# The fields whose values decide which others there may be.
_PREREQUISITES = frozenset({"eth_type", "ip_proto", "icmpv6_type", "ct_state", "ct_nw_proto"})


class FlowKey(NamedTuple):
    """What makes two flows the same one: the later replaces the earlier."""

    table: int
    priority: int
    match: Match = ()


class Flow(msgspec.Struct, frozen=True, gc=False):
    """What becomes of packets that meet the match in a table, and no flow of a higher priority there."""

    table: int
    priority: int
    match: Match = ()
    actions: tuple[Action, ...] = ()
    # The table that goes on with them; None: they have been dealt with.
    goto: int | None = None
    # The number of the meter that they have to pass before; 0: none.
    meter: int = 0

    @property
    def key(self) -> FlowKey:
        return FlowKey(self.table, self.priority, self.match)

    @property
    def form(self) -> tuple[object, ...]:
        """What a switch goes by when it takes or refuses a flow: flows of one form differ in numbers only."""
        conditions = (
            each if each.name in _PREREQUISITES else (each.name, each.mask == FIELDS[each.name].whole)
            for each in self.match
        )
        return (self.table, self.goto, bool(self.meter), *conditions, *map(_form_of, self.actions))

    def __str__(self) -> str:
        """As ovs-ofctl reads it."""
        conditions = f",{told(self.match)}" if self.match else ""
        meter = [f"meter:{self.meter}"] if self.meter else []
        actions = [*meter, *map(str, self.actions), *([] if self.goto is None else [f"goto_table:{self.goto}"])]
        return f"table={self.table},priority={self.priority}{conditions},actions={','.join(actions) or 'drop'}"


def _form_of(action: Action) -> Action | str | int:
    """What is left of an action without the number of a port and the value of a field."""
    match action:
        case SetField():
            return action.name
        case Output():
            return max(action.port, _RESERVED_PORTS)
        case _:
            return action


class FlowCount(NamedTuple):
    """A flow as the switch has it, whose it is, and how many packets met it."""

    flow: Flow
    cookie: int
    packets: int


def add_flow(flow: Flow) -> bytes:
    """The body of a message that puts a flow, in place of any with the same key."""
    return _mod(ADD, flow.key, cookie=OWNER, mask=0) + _instructions(flow)


def delete_flow(key: FlowKey) -> bytes:
    """The body of a message that takes a flow of ours away; gone already is fine."""
    return _mod(DELETE_STRICT, key, cookie=OWNER, mask=OWNER_MASK)


def _mod(command: int, key: FlowKey, *, cookie: int, mask: int) -> bytes:
    head = _MOD.pack(cookie, mask, key.table, command, 0, 0, key.priority, _ANY, _ANY, _ANY, 0, 0)
    return head + encode_match(key.match)


def _instructions(flow: Flow) -> bytes:
    actions = encode_actions(flow.actions)
    apply = _APPLY_FORM.pack(_APPLY, _APPLY_FORM.size + len(actions)) + actions if actions else b""
    meter = _METER_FORM.pack(_METER, _METER_FORM.size, flow.meter) if flow.meter else b""
    return meter + apply + (b"" if flow.goto is None else _GOTO_FORM.pack(_GOTO, _GOTO_FORM.size, flow.goto))


def flows_request() -> bytes:
    """The body of a question for all flows of ours."""
    return _STATS_REQUEST.pack(_ALL_TABLES, _ANY, _ANY, OWNER, OWNER_MASK) + encode_match(())


def decode_flows(data: bytes) -> Iterator[FlowCount]:
    """The flows of one part of the answer."""
    at = 0
    while at < len(data):
        length, table, _, _, priority, _, _, _, _, cookie, packets, _ = unpack(_STATS, data, at)
        if length < _STATS.size or at + length > len(data):
            raise DatapathFault("openflow: a flow of an impossible length")
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
            raise DatapathFault("openflow: an instruction of an impossible length")
        body = data[at : at + length]
        at += length
        if kind == _APPLY:
            actions += decode_actions(body[_APPLY_FORM.size :])
        elif kind == _GOTO:
            goto = unpack(_GOTO_FORM, body)[2]
        elif kind == _METER:
            meter = unpack(_METER_FORM, body)[2]
        else:
            actions += (Unknown(body),)
    return actions, goto, meter
