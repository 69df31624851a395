"""What the switch would do with a packet, asked by `ofproto/trace`.

The switch cannot trace through its connection tracker: it goes on without the ends of the connection. So the second
half is asked for by itself, with them, from the table and with the registers to which the first half has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from weft.adapters.netns.kernel_state import PORT_MAC
from weft.adapters.netns.nft.policy_chains import REASONS
from weft.adapters.ovs.control.unixctl import ask_switch
from weft.adapters.ovs.ovsdb.bridge import NAME, SwitchPort
from weft.adapters.ovs.ovsdb.uplinks import PATCH
from weft.adapters.ovs.pipeline.tables import OUTCOME, TENANT
from weft.domain.addresses import mac_of
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Port, StateItem
from weft.domain.errors import DatapathFault
from weft.domain.policy.model.protocols import SCTP, TCP, UDP
from weft.ports.datapath import Drop, Question

_TRACE, _TRACE_ON = "ofproto/trace", "ofproto/trace-packet-out"
NO_WAY = "weft/nowhere"

_RESUMED = re.compile(r"will be resumed at table (\d+)")
_FINAL = re.compile(r"^Final flow: (.*)$", re.MULTILINE)
_REGISTER = re.compile(r"\b(reg\d+)=0x([0-9a-f]+)\b")
_LEAVES = re.compile(r"-> output port is (\d+)")
_PORTED = {TCP: "tcp", UDP: "udp", SCTP: "sctp"}
_CALLER = 40_000
_ECHO = {4: 8, 6: 128}
_HOPS = 64


class Verdict(NamedTuple):
    """The number of the port that the packet would leave by, or 0 and the outcome with which it would be refused."""

    port: int
    outcome: int


def trace(
    directory: Path, question: Question, ports: Mapping[str, SwitchPort], *, trunk: int, parts: Iterable[StateItem]
) -> str | Drop:
    """See `weft.ports.datapath.Datapath.trace`; the switch has these parts, and the trunk is none of the ports."""
    own = ports.get(question.port.interface)
    if own is None or not own.number:
        raise DatapathFault(f"{question.port.interface} is not a port of {NAME}")
    packet = packet_of(question, in_port=own.number, target_mac=_mac_at(question, parts))
    answer = ask_switch(directory, _TRACE, NAME, packet)
    if more := second_half(answer, question, packet):
        answer = ask_switch(directory, _TRACE_ON, NAME, *more)
    number, outcome = verdict(answer)
    if number:
        names = {port.number: name for name, port in ports.items()} | {trunk: PATCH}
        return names.get(number, f"port {number}")
    return Drop(
        tenant=question.port.tenant,
        outcome=0 if outcome in REASONS else outcome,
        reason=REASONS.get(outcome, "" if outcome else NO_WAY),
        source=question.source,
        target=question.target,
        protocol=question.protocol,
        target_port=question.target_port,
        in_iface=own.interface,
    )


def _mac_at(question: Question, parts: Iterable[StateItem]) -> str:
    """Whom the workload speaks to: its neighbour on a segment, else its host end."""
    if not question.port.segment:
        return PORT_MAC
    known = (part for part in parts if isinstance(part, Port | RemoteMac) and part.tenant == question.port.tenant)
    return next((each.mac for each in known if question.target in each.addresses), mac_of(question.target))


def packet_of(question: Question, *, in_port: int, target_mac: str) -> str:
    """The packet in the words of ovs-ofctl(8)."""
    family = question.source.family
    kind, ends = ("ip", ("nw_src", "nw_dst")) if family == 4 else ("ipv6", ("ipv6_src", "ipv6_dst"))
    words = [
        f"in_port={in_port}",
        f"dl_src={question.port.mac}",
        f"dl_dst={target_mac}",
        kind,
        f"{ends[0]}={question.source}",
        f"{ends[1]}={question.target}",
        f"nw_proto={question.protocol}",
        f"nw_ttl={_HOPS}",
    ]
    if name := _PORTED.get(question.protocol):
        words += [f"{name}_src={_CALLER}", f"{name}_dst={question.target_port}"]
    elif question.is_echo:
        words.append(f"icmp{'' if family == 4 else 'v6'}_type={_ECHO[family]}")
    return ",".join(words)


def second_half(answer: str, question: Question, packet: str) -> tuple[str, str] | None:
    """The packet with its connection known, and how to go on with it; None when it does not come so far."""
    resumed, final = _RESUMED.search(answer), _FINAL.search(answer)
    if resumed is None or final is None:
        return None
    registers = _registers(final[1])
    known = (f"{name}={value:#x}" for name, value in registers.items())
    connection = _connection(question, zone=registers.get(TENANT, 0))
    return ",".join([packet, *connection, *known]), f"resubmit(,{resumed[1]})"


def verdict(answer: str) -> Verdict:
    """What the last answer comes to."""
    if leaves := _LEAVES.findall(answer):
        return Verdict(int(leaves[-1]), 0)
    finals = _FINAL.findall(answer)
    return Verdict(0, _registers(finals[-1]).get(OUTCOME, 0) if finals else 0)


def _registers(flow: str) -> dict[str, int]:
    return {name: int(value, 16) for name, value in _REGISTER.findall(flow)}


def _connection(question: Question, *, zone: int) -> list[str]:
    prefix = "ct_nw" if question.source.family == 4 else "ct_ipv6"
    words = [
        "ct_state=trk|new",
        f"ct_zone={zone}",
        f"{prefix}_src={question.source}",
        f"{prefix}_dst={question.target}",
        f"ct_nw_proto={question.protocol}",
    ]
    if question.protocol in _PORTED:
        words += [f"ct_tp_src={_CALLER}", f"ct_tp_dst={question.target_port}"]
    return words
