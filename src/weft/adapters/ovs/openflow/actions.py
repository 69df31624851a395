"""What a flow does to a packet: actions of OpenFlow 1.4 and of Open vSwitch (ovs-actions(7)), as values and bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from weft.adapters.ovs.openflow.fields import FIELDS, Field, decode_field, encode_field, text, unpack
from weft.domain.errors import DatapathFault

IN_PORT: Final = 0xFFFFFFF8
NORMAL: Final = 0xFFFFFFFA
LOCAL: Final = 0xFFFFFFFE
CONTROLLER: Final = 0xFFFFFFFD
# How much of a packet is told: its headers.
TOLD_BYTES: Final = 128
_PORT_NAMES = {IN_PORT: "IN_PORT", NORMAL: "NORMAL", LOCAL: "LOCAL"}

_HEAD = struct.Struct("!HH")
_OUTPUT, _PUSH_VLAN, _POP_VLAN, _DEC_TTL, _SET_FIELD, _VENDOR = 0, 17, 18, 24, 25, 0xFFFF
_VLAN = 0x8100
_PUSH_FORM = struct.Struct("!HHH2x")
_NICIRA = 0x2320
_MOVE, _RESUBMIT, _OUTPUT_REGISTER, _CT = 6, 14, 15, 35
_OUTPUT_FORM = struct.Struct("!HHIH6x")
_VENDOR_FORM = struct.Struct("!HHIH")
_MOVE_FORM = struct.Struct("!HHIHHHHII")
_RESUBMIT_FORM = struct.Struct("!HHIHHB3x")
_CT_FORM = struct.Struct("!HHIHHIHB3xH")
_REGISTER_FORM = struct.Struct("!HHIHHIH6x")
_WHOLE_REGISTER = 31
_MOST_BYTES = 0xFFFF
# Fields that can be moved, by the numbers they had before OpenFlow knew them, if any: the switch tells moves so.
_MOVED: Mapping[str, tuple[int, int]] = {
    **{name: (field.group, field.number) for name, field in FIELDS.items() if field.group == 1},
    "eth_dst": (0, 1), "eth_src": (0, 2), "ip_src": (0, 7), "ip_dst": (0, 8), "arp_spa": (0, 16), "arp_tpa": (0, 17),
    "arp_sha": (1, 17), "arp_tha": (1, 18), "ipv6_src": (1, 19), "ipv6_dst": (1, 20), "nd_target": (1, 23),
    "nd_tll": (1, 25), **{name: (FIELDS[name].group, FIELDS[name].number) for name in ("sctp_src", "sctp_dst")},
}  # fmt: skip
_SAME_PORT = 0xFFF8
_NO_TABLE = 0xFF
_CT_COMMIT = 1


class Output(msgspec.Struct, frozen=True, gc=False):
    """Send the packet as it is now out of a port."""

    port: int

    def __str__(self) -> str:
        return _PORT_NAMES.get(self.port, f"output:{self.port}")


class OutputRegister(msgspec.Struct, frozen=True, gc=False):
    """Send the packet out of the port whose number a register has."""

    name: str

    def __str__(self) -> str:
        return f"output:{self.name}"


class Controller(msgspec.Struct, frozen=True, gc=False):
    """Tell whoever listens to the bridge how the packet begins."""

    def __str__(self) -> str:
        return f"CONTROLLER:{TOLD_BYTES}"


class SetField(msgspec.Struct, frozen=True, gc=False):
    name: str
    value: int

    def __str__(self) -> str:
        return f"set_field:{text(FIELDS[self.name], self.value)}->{self.name}"


class Move(msgspec.Struct, frozen=True, gc=False):
    """Copy a field over another that is as large, or larger."""

    source: str
    target: str

    def __str__(self) -> str:
        bits, onto = FIELDS[self.source].bits, FIELDS[self.target].bits
        return f"move:{self.source}[]->{self.target}[{'' if bits == onto else f'0..{bits - 1}'}]"


class DecrementTtl(msgspec.Struct, frozen=True, gc=False):
    """One hop less to go; who has none left is dropped."""

    def __str__(self) -> str:
        return "dec_ttl"


class PushVlan(msgspec.Struct, frozen=True, gc=False):
    """Give the packet a VLAN tag, whose number `vlan_vid` is set to next."""

    def __str__(self) -> str:
        return f"push_vlan:{_VLAN:#x}"


class PopVlan(msgspec.Struct, frozen=True, gc=False):
    """Take the packet's VLAN tag off."""

    def __str__(self) -> str:
        return "pop_vlan"


class Resubmit(msgspec.Struct, frozen=True, gc=False):
    """Look the packet up in another table, and come back."""

    table: int

    def __str__(self) -> str:
        return f"resubmit(,{self.table})"


class Ct(msgspec.Struct, frozen=True, gc=False):
    """Hand the packet to the connection tracker, in the zone that a register has.

    With a table a copy of it, whose connection is known, goes on there.
    """

    # The register whose lower 16 bits are the zone.
    zone: str
    table: int | None = None
    commit: bool = False
    # The register that becomes the mark of a connection which is committed.
    mark: str = ""

    def __str__(self) -> str:
        words = ["commit"] if self.commit else []
        words += [] if self.table is None else [f"table={self.table}"]
        words.append(f"zone={self.zone}[0..15]")
        words += [f"exec({_marking(self.mark)})"] if self.mark else []
        return f"ct({','.join(words)})"


def _marking(register: str) -> Move:
    return Move(register, "ct_mark")


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """An action that is none of ours."""

    data: bytes

    def __str__(self) -> str:
        return f"unknown:{self.data.hex()}"


Action = (
    Output | OutputRegister | Controller | SetField | Move | DecrementTtl | PushVlan | PopVlan | Resubmit | Ct | Unknown
)


def encode_actions(actions: Sequence[Action]) -> bytes:
    return b"".join(map(_encode, actions))


def _encode(action: Action) -> bytes:
    match action:
        case Output():
            return _OUTPUT_FORM.pack(_OUTPUT, _OUTPUT_FORM.size, action.port, 0)
        case Controller():
            return _OUTPUT_FORM.pack(_OUTPUT, _OUTPUT_FORM.size, CONTROLLER, TOLD_BYTES)
        case OutputRegister():
            source = FIELDS[action.name].header
            return _REGISTER_FORM.pack(
                _VENDOR, _REGISTER_FORM.size, _NICIRA, _OUTPUT_REGISTER, _WHOLE_REGISTER, source, _MOST_BYTES
            )
        case SetField():
            body = encode_field(FIELDS[action.name], action.value)
            length = _HEAD.size + len(body) + 7 & ~7
            return (_HEAD.pack(_SET_FIELD, length) + body).ljust(length, b"\0")
        case Move():
            moved, onto = FIELDS[action.source], FIELDS[action.target]
            return _MOVE_FORM.pack(
                _VENDOR, _MOVE_FORM.size, _NICIRA, _MOVE, moved.bits, 0, 0, _moved(moved), _moved(onto)
            )
        case DecrementTtl():
            return _HEAD.pack(_DEC_TTL, 8) + bytes(4)
        case PushVlan():
            return _PUSH_FORM.pack(_PUSH_VLAN, _PUSH_FORM.size, _VLAN)
        case PopVlan():
            return _HEAD.pack(_POP_VLAN, 8) + bytes(4)
        case Resubmit():
            return _RESUBMIT_FORM.pack(_VENDOR, _RESUBMIT_FORM.size, _NICIRA, _RESUBMIT, _SAME_PORT, action.table)
        case Ct():
            flags, table = _CT_COMMIT if action.commit else 0, _NO_TABLE if action.table is None else action.table
            zone = FIELDS[action.zone].header
            marking = _encode(_marking(action.mark)) if action.mark else b""
            length = _CT_FORM.size + len(marking)
            return _CT_FORM.pack(_VENDOR, length, _NICIRA, _CT, flags, zone, 15, table, 0) + marking
        case Unknown():
            return action.data


def decode_actions(data: bytes) -> tuple[Action, ...]:
    actions: list[Action] = []
    at = 0
    while at < len(data):
        _, length = unpack(_HEAD, data, at)
        if length < 8 or length % 8 or at + length > len(data):
            raise DatapathFault("openflow: an action of an impossible length")
        actions.append(_decode(data[at : at + length]))
        at += length
    return tuple(actions)


def _decode(data: bytes) -> Action:
    """The action, or `Unknown` unless it would be encoded as these very bytes."""
    found = _guess(data)
    return found if found is not None and _encode(found) == data else Unknown(data)


def _guess(data: bytes) -> Action | None:
    kind, length = unpack(_HEAD, data)
    match kind:
        case 0 if length == _OUTPUT_FORM.size:
            port = unpack(_OUTPUT_FORM, data)[2]
            return Controller() if port == CONTROLLER else Output(port)
        case 17:
            return PushVlan()
        case 18:
            return PopVlan()
        case 24:
            return DecrementTtl()
        case 25:
            found = decode_field(data[_HEAD.size :])
            return None if found is None else SetField(found[0].name, found[1])
        case 0xFFFF if length >= 16 and unpack(_VENDOR_FORM, data)[2] == _NICIRA:
            return _guess_own(data, unpack(_VENDOR_FORM, data)[3])
        case _:
            return None


def _guess_own(data: bytes, subtype: int) -> Action | None:
    """An action that Open vSwitch added."""
    if subtype == _MOVE and len(data) == _MOVE_FORM.size:
        *_, source, target = unpack(_MOVE_FORM, data)
        names = _MOVED_NAMES.get(source), _MOVED_NAMES.get(target)
        return Move(names[0], names[1]) if names[0] and names[1] else None
    if subtype == _RESUBMIT and len(data) == _RESUBMIT_FORM.size:
        return Resubmit(unpack(_RESUBMIT_FORM, data)[5])
    if subtype == _OUTPUT_REGISTER and len(data) == _REGISTER_FORM.size:
        name = _REGISTERS.get(unpack(_REGISTER_FORM, data)[5])
        return OutputRegister(name) if name else None
    if subtype == _CT and len(data) >= _CT_FORM.size:
        _, _, _, _, flags, source, _, table, _ = unpack(_CT_FORM, data)
        zone, mark = _REGISTERS.get(source), _mark_of(data[_CT_FORM.size :])
        if zone and mark is not None:
            return Ct(zone, None if table == _NO_TABLE else table, bool(flags & _CT_COMMIT), mark)
    return None


def _mark_of(data: bytes) -> str | None:
    """The register that a connection's mark comes from, none where it gets no mark; nothing when it is not ours."""
    match decode_actions(data):
        case ():
            return ""
        case (Move(source, "ct_mark"),):
            return source
        case _:
            return None


def _moved(field: Field) -> int:
    group, number = _MOVED[field.name]
    return group << 16 | number << 9 | field.size


_MOVED_NAMES = {_moved(FIELDS[name]): name for name in _MOVED}
_REGISTERS = {field.header: name for name, field in FIELDS.items() if name.startswith("reg")}
