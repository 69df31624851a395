"""Ask the switch what it would do with a packet, by `ofproto/trace`.

ofproto/trace cannot look into conntrack: behind ct() it continues without the addresses of the connection, on which
policy matches. So the part behind ct() is traced by a second request, which gives them, with the table and registers
that the first one ended with.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from weft.adapters.netns.devices import PORT_MAC
from weft.adapters.netns.drop_reasons import DROP_REASONS, NO_ROUTE
from weft.adapters.ovs.control.unixctl import unixctl_call
from weft.adapters.ovs.ovsdb.bridge import BRIDGE, SwitchPort
from weft.adapters.ovs.ovsdb.uplinks import PATCH
from weft.adapters.ovs.pipeline.tables import TENANT, VERDICT
from weft.domain.addresses import mac_of
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Port, StateItem
from weft.domain.errors import DatapathFault
from weft.domain.policy.model.protocols import SCTP, TCP, UDP
from weft.ports.datapath import Drop, TraceRequest

_TRACE, _TRACE_RESUME = "ofproto/trace", "ofproto/trace-packet-out"

# ofproto/trace has no machine-readable output: these parse the text it prints for people.
_RESUMED = re.compile(r"will be resumed at table (\d+)")
_FINAL = re.compile(r"^Final flow: (.*)$", re.MULTILINE)
_REGISTER = re.compile(r"\b(reg\d+)=0x([0-9a-f]+)\b")
_OUTPUT = re.compile(r"-> output port is (\d+)")
_PORTED = {TCP: "tcp", UDP: "udp", SCTP: "sctp"}
# Any ephemeral port.
_SOURCE_PORT = 40_000
_ECHO_REQUEST = {4: 8, 6: 128}
_DEFAULT_TTL = 64


class TraceResult(NamedTuple):
    """Where a trace ended: the output port, or 0 and the verdict that dropped the packet."""

    port: int
    verdict_id: int


def trace(
    directory: Path, request: TraceRequest, ports: Mapping[str, SwitchPort], *, trunk: int, items: Iterable[StateItem]
) -> str | Drop:
    """See `weft.ports.datapath.Datapath.trace`. `items` are those of the flows; `trunk` is the port of the uplinks."""
    own = ports.get(request.port.interface)
    if own is None or not own.ofport:
        raise DatapathFault(f"{request.port.interface} is not a port of {BRIDGE}")
    packet = encode_packet(request, in_port=own.ofport, target_mac=_destination_mac(request, items))
    output = unixctl_call(directory, _TRACE, BRIDGE, packet)
    if resumed := resume_after_ct(output, request, packet):
        output = unixctl_call(directory, _TRACE_RESUME, BRIDGE, *resumed)
    ofport, verdict_id = parse_result(output)
    if ofport:
        # The patch to the VLAN bridge is none of the workload ports.
        names = {port.ofport: name for name, port in ports.items()} | {trunk: PATCH}
        return names.get(ofport, f"port {ofport}")
    return Drop(
        tenant=request.port.tenant,
        verdict_id=0 if verdict_id in DROP_REASONS else verdict_id,
        reason=DROP_REASONS.get(verdict_id, "" if verdict_id else NO_ROUTE),
        source=request.source,
        target=request.target,
        protocol=request.protocol,
        target_port=request.target_port,
        in_iface=own.interface,
    )


def _destination_mac(request: TraceRequest, items: Iterable[StateItem]) -> str:
    """The destination MAC that the workload would use: of the endpoint on a segment, else of the gateway."""
    if not request.port.segment:
        return PORT_MAC
    endpoints = (item for item in items if isinstance(item, Port | RemoteMac) and item.tenant == request.port.tenant)
    # MACs are derived from addresses, so that of an unknown endpoint is a good guess.
    return next((item.mac for item in endpoints if request.target in item.addresses), mac_of(request.target))


def encode_packet(request: TraceRequest, *, in_port: int, target_mac: str) -> str:
    """The packet in the flow syntax of ovs-ofctl(8)."""
    family = request.source.family
    protocol, fields = ("ip", ("nw_src", "nw_dst")) if family == 4 else ("ipv6", ("ipv6_src", "ipv6_dst"))
    flow = [
        f"in_port={in_port}",
        f"dl_src={request.port.mac}",
        f"dl_dst={target_mac}",
        protocol,
        f"{fields[0]}={request.source}",
        f"{fields[1]}={request.target}",
        f"nw_proto={request.protocol}",
        f"nw_ttl={_DEFAULT_TTL}",
    ]
    if name := _PORTED.get(request.protocol):
        flow += [f"{name}_src={_SOURCE_PORT}", f"{name}_dst={request.target_port}"]
    elif request.is_echo:
        flow.append(f"icmp{'' if family == 4 else 'v6'}_type={_ECHO_REQUEST[family]}")
    return ",".join(flow)


def resume_after_ct(output: str, request: TraceRequest, packet: str) -> tuple[str, str] | None:
    """Arguments of the trace behind ct(): the packet with its connection, and the action. None if it is not reached."""
    resumed, final = _RESUMED.search(output), _FINAL.search(output)
    if resumed is None or final is None:
        return None
    # The first "Final flow" is the state at ct(); a second one would be that of the wrong continuation.
    registers = _registers(final[1])
    known = (f"{name}={value:#x}" for name, value in registers.items())
    connection = _connection(request, zone=registers.get(TENANT, 0))
    return ",".join([packet, *connection, *known]), f"resubmit(,{resumed[1]})"


def parse_result(output: str) -> TraceResult:
    """The result of the last trace output."""
    if ofports := _OUTPUT.findall(output):
        return TraceResult(int(ofports[-1]), 0)
    finals = _FINAL.findall(output)
    return TraceResult(0, _registers(finals[-1]).get(VERDICT, 0) if finals else 0)


def _registers(flow: str) -> dict[str, int]:
    return {name: int(value, 16) for name, value in _REGISTER.findall(flow)}


def _connection(request: TraceRequest, *, zone: int) -> list[str]:
    prefix = "ct_nw" if request.source.family == 4 else "ct_ipv6"
    flow = [
        "ct_state=trk|new",
        f"ct_zone={zone}",
        f"{prefix}_src={request.source}",
        f"{prefix}_dst={request.target}",
        f"ct_nw_proto={request.protocol}",
    ]
    if request.protocol in _PORTED:
        flow += [f"ct_tp_src={_SOURCE_PORT}", f"ct_tp_dst={request.target_port}"]
    return flow
