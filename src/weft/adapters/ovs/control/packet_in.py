"""Decode the packet-in messages of flows that drop packets, for the drop log (pure)."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from weft.adapters.netns.drop_reasons import DROP_REASONS
from weft.adapters.ovs.openflow.client import PacketIn
from weft.adapters.ovs.openflow.fields import decode_match, unpack
from weft.adapters.ovs.openflow.flows import OWNER, OWNER_MASK
from weft.adapters.ovs.ovsdb.bridge import TENANT_KEY, SwitchPort
from weft.adapters.ovs.pipeline.context import ETHER_TYPES
from weft.adapters.ovs.pipeline.tables import OUTPUT_PORT, TENANT, VERDICT
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.kernel.packet_headers import Packet, parse_packet
from weft.ports.datapath import Drop

# struct ofp13_packet_in: buffer ID, length, reason, table, cookie; then the match, padding and the frame.
_OFP_PACKET_IN = struct.Struct("!IHBBQ")
_PADDING = 2
_ETHER_TYPE = slice(12, 14)
_ETH_P_8021Q = 0x8100
_VLAN_TAG_SIZE = 4


def decode_drop(packet_in: PacketIn, tenants: Mapping[int, TenantName], ports: Mapping[int, SwitchPort]) -> Drop | None:
    """A dropped packet; None if a flow of another controller sent it, or if it is not IP."""
    *_, cookie = unpack(_OFP_PACKET_IN, packet_in.body)
    conditions, used = decode_match(packet_in.body[_OFP_PACKET_IN.size :])
    packet = _ip_packet(packet_in.body[_OFP_PACKET_IN.size + used + _PADDING :])
    # Foreign controllers may have flows on this bridge that send packets to every controller.
    if cookie & OWNER_MASK != OWNER or packet is None:
        return None
    fields = {condition.name: condition.value for condition in conditions}
    in_iface = ports.get(fields.get("in_port", 0))
    tenant = tenants.get(fields.get(TENANT, 0)) or (in_iface and TenantName(in_iface.external_ids.get(TENANT_KEY, "")))
    if not tenant:
        return None
    out_iface = ports.get(fields.get(OUTPUT_PORT, 0))
    # The register holds a built-in drop reason or a verdict id; their ranges do not overlap.
    verdict_id = fields.get(VERDICT, 0)
    return Drop(
        tenant=tenant,
        verdict_id=0 if verdict_id in DROP_REASONS else verdict_id,
        reason=DROP_REASONS.get(verdict_id, ""),
        source=packet.source,
        target=packet.target,
        protocol=packet.protocol,
        source_port=packet.source_port,
        target_port=packet.target_port,
        in_iface=in_iface.interface if in_iface else "",
        out_iface=out_iface.interface if out_iface else "",
        at=packet_in.at,
    )


def _ip_packet(frame: bytes) -> Packet | None:
    """The IP packet in a frame; None if it is not IP, or malformed: a workload may send anything."""
    # Flows to uplinks push the tag before policy drops the packet.
    if _ether_type(frame) == _ETH_P_8021Q:
        frame = frame[_VLAN_TAG_SIZE:]
    if _ether_type(frame) not in ETHER_TYPES.values():
        return None
    try:
        return parse_packet(frame[_ETHER_TYPE.stop :])
    except DatapathFault:
        return None


def _ether_type(frame: bytes) -> int:
    return int.from_bytes(frame[_ETHER_TYPE], "big")
