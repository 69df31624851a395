"""Actions of OpenFlow 1.4 and of Open vSwitch's extensions (ovs-actions(7)), encoded and decoded."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from weft.adapters.ovs.openflow import constants
from weft.adapters.ovs.openflow.constants import (
    ETH_TYPE_VLAN_8021Q,
    NX_CT_F_COMMIT,
    NX_CT_RECIRC_NONE,
    NX_VENDOR_ID,
    NXAST_CT,
    NXAST_OUTPUT_REG,
    NXAST_REG_MOVE,
    NXAST_RESUBMIT_TABLE,
    NXM_NX,
    NXM_OF,
    OFPAT_DEC_NW_TTL,
    OFPAT_EXPERIMENTER,
    OFPAT_OUTPUT,
    OFPAT_POP_VLAN,
    OFPAT_PUSH_VLAN,
    OFPAT_SET_FIELD,
    OFPP10_IN_PORT,
    OFPP_CONTROLLER,
    OFPP_IN_PORT,
    OFPP_LOCAL,
    OFPP_NORMAL,
)
from weft.adapters.ovs.openflow.fields import FIELDS, Field, decode_field, encode_field, text, unpack
from weft.domain.errors import DatapathFault

# Bytes of a packet sent to the controller: enough for its headers.
PACKET_IN_BYTES: Final = 128
_PORT_NAMES = {OFPP_IN_PORT: "IN_PORT", OFPP_NORMAL: "NORMAL", OFPP_LOCAL: "LOCAL"}

_HEAD = struct.Struct("!HH")
_PUSH_STRUCT = struct.Struct("!HHH2x")
_OUTPUT_STRUCT = struct.Struct("!HHIH6x")
_VENDOR_STRUCT = struct.Struct("!HHIH")
_MOVE_STRUCT = struct.Struct("!HHIHHHHII")
_RESUBMIT_STRUCT = struct.Struct("!HHIHHB3x")
_CT_STRUCT = struct.Struct("!HHIHHIHB3xH")
_REGISTER_STRUCT = struct.Struct("!HHIHHIH6x")
# `ofs_nbits` of a whole 32-bit register: offset 0 << 6 | 32 bits - 1.
_REGISTER_OFS_NBITS = 31
_MAX_LEN = 0xFFFF
# OVS reports NXAST_REG_MOVE with the NXM header of a field where it has one, so encode it in that form too.
_MOVABLE: Mapping[str, tuple[int, int]] = {
    **{name: (field.group, field.number) for name, field in FIELDS.items() if field.group == NXM_NX},
    "eth_dst": (NXM_OF, 1), "eth_src": (NXM_OF, 2), "ip_src": (NXM_OF, 7),
    "ip_dst": (NXM_OF, 8), "arp_spa": (NXM_OF, 16), "arp_tpa": (NXM_OF, 17),
    "arp_sha": (NXM_NX, 17), "arp_tha": (NXM_NX, 18), "ipv6_src": (NXM_NX, 19),
    "ipv6_dst": (NXM_NX, 20), "nd_target": (NXM_NX, 23), "nd_tll": (NXM_NX, 25),
    **{name: (FIELDS[name].group, FIELDS[name].number) for name in ("sctp_src", "sctp_dst")},
}  # fmt: skip


class Output(msgspec.Struct, frozen=True, gc=False):
    """Output the packet to a port."""

    port: int

    def __str__(self) -> str:
        return _PORT_NAMES.get(self.port, f"output:{self.port}")


class OutputRegister(msgspec.Struct, frozen=True, gc=False):
    """Output the packet to the port whose number is in a register."""

    name: str

    def __str__(self) -> str:
        return f"output:{self.name}"


class Controller(msgspec.Struct, frozen=True, gc=False):
    """Send the packet's first bytes to the controller."""

    def __str__(self) -> str:
        return f"CONTROLLER:{PACKET_IN_BYTES}"


class SetField(msgspec.Struct, frozen=True, gc=False):
    name: str
    value: int

    def __str__(self) -> str:
        return f"set_field:{text(FIELDS[self.name], self.value)}->{self.name}"


class Move(msgspec.Struct, frozen=True, gc=False):
    """Copy a field to another of the same or a larger size."""

    source: str
    target: str

    def __str__(self) -> str:
        bits, onto = FIELDS[self.source].bits, FIELDS[self.target].bits
        return f"move:{self.source}[]->{self.target}[{'' if bits == onto else f'0..{bits - 1}'}]"


class DecrementTtl(msgspec.Struct, frozen=True, gc=False):
    """Decrement the TTL or hop limit; drop the packet when it reaches zero."""

    def __str__(self) -> str:
        return "dec_ttl"


class PushVlan(msgspec.Struct, frozen=True, gc=False):
    """Push a VLAN header; set `vlan_vid` afterwards."""

    def __str__(self) -> str:
        return f"push_vlan:{ETH_TYPE_VLAN_8021Q:#x}"


class PopVlan(msgspec.Struct, frozen=True, gc=False):
    """Pop the VLAN header."""

    def __str__(self) -> str:
        return "pop_vlan"


class Resubmit(msgspec.Struct, frozen=True, gc=False):
    """Look the packet up in another table, then continue with the next action."""

    table: int

    def __str__(self) -> str:
        return f"resubmit(,{self.table})"


class Ct(msgspec.Struct, frozen=True, gc=False):
    """Send the packet through conntrack in the zone of a register.

    With `table`, the packet continues there with `ct_state` set (recirculation).
    """

    # The register whose lower 16 bits hold the zone.
    zone: str
    table: int | None = None
    commit: bool = False
    # The register that is copied to ct_mark of a committed connection.
    mark: str = ""

    def __str__(self) -> str:
        arguments = ["commit"] if self.commit else []
        arguments += [] if self.table is None else [f"table={self.table}"]
        arguments.append(f"zone={self.zone}[0..15]")
        arguments += [f"exec({_move_to_ct_mark(self.mark)})"] if self.mark else []
        return f"ct({','.join(arguments)})"


def _move_to_ct_mark(register: str) -> Move:
    return Move(register, "ct_mark")


class Unknown(msgspec.Struct, frozen=True, gc=False):
    """An action that we never write."""

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
            return _OUTPUT_STRUCT.pack(OFPAT_OUTPUT, _OUTPUT_STRUCT.size, action.port, 0)
        case Controller():
            return _OUTPUT_STRUCT.pack(OFPAT_OUTPUT, _OUTPUT_STRUCT.size, OFPP_CONTROLLER, PACKET_IN_BYTES)
        case OutputRegister():
            source = FIELDS[action.name].header
            return _REGISTER_STRUCT.pack(
                OFPAT_EXPERIMENTER,
                _REGISTER_STRUCT.size,
                NX_VENDOR_ID,
                NXAST_OUTPUT_REG,
                _REGISTER_OFS_NBITS,
                source,
                _MAX_LEN,
            )
        case SetField():
            body = encode_field(FIELDS[action.name], action.value)
            length = _HEAD.size + len(body) + 7 & ~7
            return (_HEAD.pack(OFPAT_SET_FIELD, length) + body).ljust(length, b"\0")
        case Move():
            moved, onto = FIELDS[action.source], FIELDS[action.target]
            return _MOVE_STRUCT.pack(
                OFPAT_EXPERIMENTER,
                _MOVE_STRUCT.size,
                NX_VENDOR_ID,
                NXAST_REG_MOVE,
                moved.bits,
                0,
                0,
                _move_header(moved),
                _move_header(onto),
            )
        case DecrementTtl():
            return _HEAD.pack(OFPAT_DEC_NW_TTL, 8) + bytes(4)
        case PushVlan():
            return _PUSH_STRUCT.pack(OFPAT_PUSH_VLAN, _PUSH_STRUCT.size, ETH_TYPE_VLAN_8021Q)
        case PopVlan():
            return _HEAD.pack(OFPAT_POP_VLAN, 8) + bytes(4)
        case Resubmit():
            return _RESUBMIT_STRUCT.pack(
                OFPAT_EXPERIMENTER,
                _RESUBMIT_STRUCT.size,
                NX_VENDOR_ID,
                NXAST_RESUBMIT_TABLE,
                OFPP10_IN_PORT,
                action.table,
            )
        case Ct():
            flags, table = (
                NX_CT_F_COMMIT if action.commit else 0,
                NX_CT_RECIRC_NONE if action.table is None else action.table,
            )
            zone = FIELDS[action.zone].header
            nested = _encode(_move_to_ct_mark(action.mark)) if action.mark else b""
            length = _CT_STRUCT.size + len(nested)
            return (
                _CT_STRUCT.pack(OFPAT_EXPERIMENTER, length, NX_VENDOR_ID, NXAST_CT, flags, zone, 15, table, 0) + nested
            )
        case Unknown():
            return action.data


def decode_actions(data: bytes) -> tuple[Action, ...]:
    actions: list[Action] = []
    at = 0
    while at < len(data):
        _, length = unpack(_HEAD, data, at)
        if length < 8 or length % 8 or at + length > len(data):
            raise DatapathFault("openflow: bad action length")
        actions.append(_decode(data[at : at + length]))
        at += length
    return tuple(actions)


def _decode(data: bytes) -> Action:
    """Decode an action; `Unknown` unless encoding it gives the same bytes."""
    # The comparison guards against fields and flags that our action classes do not carry.
    found = _decode_known(data)
    return found if found is not None and _encode(found) == data else Unknown(data)


def _decode_known(data: bytes) -> Action | None:
    kind, length = unpack(_HEAD, data)
    match kind:
        case constants.OFPAT_OUTPUT if length == _OUTPUT_STRUCT.size:
            _, _, port, max_len = unpack(_OUTPUT_STRUCT, data)
            is_packet_in = (port, max_len) == (OFPP_CONTROLLER, PACKET_IN_BYTES)
            return Controller() if is_packet_in else Output(port)
        case constants.OFPAT_PUSH_VLAN:
            return PushVlan()
        case constants.OFPAT_POP_VLAN:
            return PopVlan()
        case constants.OFPAT_DEC_NW_TTL:
            return DecrementTtl()
        case constants.OFPAT_SET_FIELD:
            found = decode_field(data[_HEAD.size :])
            return None if found is None else SetField(found[0].name, found[1])
        case constants.OFPAT_EXPERIMENTER if length >= 16 and unpack(_VENDOR_STRUCT, data)[2] == NX_VENDOR_ID:
            return _decode_nxast(data, unpack(_VENDOR_STRUCT, data)[3])
        case _:
            return None


def _decode_nxast(data: bytes, subtype: int) -> Action | None:
    """Decode a Nicira extension action."""
    if subtype == NXAST_REG_MOVE and len(data) == _MOVE_STRUCT.size:
        *_, source, target = unpack(_MOVE_STRUCT, data)
        names = _MOVABLE_BY_HEADER.get(source), _MOVABLE_BY_HEADER.get(target)
        return Move(names[0], names[1]) if names[0] and names[1] else None
    if subtype == NXAST_RESUBMIT_TABLE and len(data) == _RESUBMIT_STRUCT.size:
        return Resubmit(unpack(_RESUBMIT_STRUCT, data)[5])
    if subtype == NXAST_OUTPUT_REG and len(data) == _REGISTER_STRUCT.size:
        name = _REGISTERS.get(unpack(_REGISTER_STRUCT, data)[5])
        return OutputRegister(name) if name else None
    if subtype == NXAST_CT and len(data) >= _CT_STRUCT.size:
        _, _, _, _, flags, source, _, table, _ = unpack(_CT_STRUCT, data)
        zone, mark = _REGISTERS.get(source), _mark_of(data[_CT_STRUCT.size :])
        if zone and mark is not None:
            return Ct(zone, None if table == NX_CT_RECIRC_NONE else table, bool(flags & NX_CT_F_COMMIT), mark)
    return None


def _mark_of(data: bytes) -> str | None:
    """Return the register copied to ct_mark, "" without nested actions, None when they are not ours."""
    if not data:
        return ""
    # By its size first: actions nested in each other would exhaust the stack.
    match _decode(data) if len(data) == _MOVE_STRUCT.size else None:
        case Move(source, "ct_mark"):
            return source
        case _:
            return None


def _move_header(field: Field) -> int:
    group, number = _MOVABLE[field.name]
    return group << 16 | number << 9 | field.size


_MOVABLE_BY_HEADER = {_move_header(FIELDS[name]): name for name in _MOVABLE}
_REGISTERS = {field.header: name for name, field in FIELDS.items() if name.startswith("reg")}
