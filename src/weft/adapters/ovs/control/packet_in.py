"""What the switch tells about packets that it refused, in the words of the port (pure)."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from weft.adapters.netns.nft.policy_chains import REASONS
from weft.adapters.ovs.openflow.client import PacketIn
from weft.adapters.ovs.openflow.fields import decode_match, unpack
from weft.adapters.ovs.openflow.flows import OWNER, OWNER_MASK
from weft.adapters.ovs.ovsdb.bridge import TENANT_MARK, SwitchPort
from weft.adapters.ovs.pipeline.context import ETHER_TYPES
from weft.adapters.ovs.pipeline.tables import LEAVES_BY, OUTCOME, TENANT
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.kernel.packet_headers import Packet, parse_packet
from weft.ports.datapath import Drop

_FORM = struct.Struct("!IHBBQ")
_PADDING = 2
_TYPE = slice(12, 14)
_TAG = 0x8100
_TAG_BYTES = 4


def drop_of(told: PacketIn, tenants: Mapping[int, TenantName], ports: Mapping[int, SwitchPort]) -> Drop | None:
    """A refused packet; None when a flow of somebody else tells of it, or when it is not of IP."""
    *_, cookie = unpack(_FORM, told.body)
    conditions, used = decode_match(told.body[_FORM.size :])
    packet = _inside(told.body[_FORM.size + used + _PADDING :])
    if cookie & OWNER_MASK != OWNER or packet is None:
        return None
    fields = {each.name: each.value for each in conditions}
    in_iface = ports.get(fields.get("in_port", 0))
    tenant = tenants.get(fields.get(TENANT, 0)) or (in_iface and TenantName(in_iface.marks.get(TENANT_MARK, "")))
    if not tenant:
        return None
    out_iface = ports.get(fields.get(LEAVES_BY, 0))
    outcome = fields.get(OUTCOME, 0)
    return Drop(
        tenant=tenant,
        outcome=0 if outcome in REASONS else outcome,
        reason=REASONS.get(outcome, ""),
        source=packet.source,
        target=packet.target,
        protocol=packet.protocol,
        source_port=packet.source_port,
        target_port=packet.target_port,
        in_iface=in_iface.interface if in_iface else "",
        out_iface=out_iface.interface if out_iface else "",
        at=told.at,
    )


def _inside(frame: bytes) -> Packet | None:
    """The packet in a frame, if it is of IP; a workload may say so of what is none, or end anywhere."""
    if _kind_of(frame) == _TAG:
        frame = frame[_TAG_BYTES:]
    if _kind_of(frame) not in ETHER_TYPES.values():
        return None
    try:
        return parse_packet(frame[_TYPE.stop :])
    except DatapathFault:
        return None


def _kind_of(frame: bytes) -> int:
    return int.from_bytes(frame[_TYPE], "big")
