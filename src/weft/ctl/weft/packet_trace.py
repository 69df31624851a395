"""`weft trace --packet`: a real packet, and whether what became of it is what the policy engine says.

It is sent from the workload itself, and looked for where it should come out on this node: at the host end of its
target, or at the overlay. The agent says what it refused. What another node does is known by its answer only: a packet
that left by the overlay and was not answered may have been refused there, and `weft drops` there would say so.
"""

from __future__ import annotations

import argparse
import select
import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, cast

from weft.ctl.client import decode_row, decode_rows
from weft.ctl.failures import CommandError
from weft.ctl.weft.agent_client import ask_agent, inspect_agent
from weft.ctl.weft.probes import Probe, Tap, Way, open_probe
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import PORTED
from weft.drivers import datapath_tools

EXIT_AGREE, EXIT_DIFFER, EXIT_UNSEEN = 0, 1, 6

_TRIES = 4
_TRY_S = 1.0
_LOOK_S = 0.1
# By how much the times of packets may be off.
_CLOCK_S = 1.0


class Fate(StrEnum):
    """What became of the packet, as far as this node can know."""

    ANSWERED = "answered"
    ARRIVED = "arrived"
    LEFT = "left"
    REFUSED = "refused"
    UNSEEN = "unseen"


class Seen(NamedTuple):
    """The fate of a packet: by which device it went or what answered, or which rule refused it, and why."""

    fate: Fate
    by: str = ""
    why: str = ""

    @property
    def has_passed(self) -> bool:
        return self.fate in {Fate.ANSWERED, Fate.ARRIVED, Fate.LEFT}

    def __str__(self) -> str:
        match self.fate:
            case Fate.ANSWERED:
                return f"it was answered by {self.by}"
            case Fate.ARRIVED:
                return f"it came out at the target's host end {self.by}"
            case Fate.LEFT:
                return (
                    f"it left this node by {self.by}; nobody has answered, so what its target's node did is not known"
                )
            case Fate.REFUSED:
                return f"it was refused by {self.by}: {self.why}"
            case Fate.UNSEEN:
                return "nothing was seen of it: neither did it come out anywhere, nor was it told to be refused"


def trace_packet(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Send the packet and compare. Gives the exit code (0 they agree, 1 they differ, 6 nothing was seen), and both
    verdicts as JSON and as text."""
    query = {"src": args.source, "dst": args.target, "service": args.service, "version": args.ipv6 or ""}
    traced = cast("dict[str, Any]", decode_row(ask_agent(args.agent, "/trace", **query)))
    seen = _try_out(args.agent, traced)
    agree = judge(traced["explanation"], seen)
    code = {True: EXIT_AGREE, False: EXIT_DIFFER, None: EXIT_UNSEEN}[agree]
    packet = {"fate": seen.fate, "by": seen.by, "why": seen.why, **_ends(traced)}
    return code, {"engine": traced["explanation"], "packet": packet, "agree": agree}, "\n".join(tell(traced, seen))


def judge(explanation: Mapping[str, Any], seen: Seen) -> bool | None:
    """Whether the engine and the packet agree, down to the rule that refuses; None when nothing was seen."""
    if seen.fate is Fate.UNSEEN:
        return None
    if explanation["allowed"]:
        return seen.has_passed
    return seen.fate is Fate.REFUSED and seen.by == explanation["decidedBy"]


def tell(traced: Mapping[str, Any], seen: Seen) -> Iterator[str]:
    """Both verdicts, and what they come to."""
    explanation, ends = traced["explanation"], _ends(traced)
    verdict = "ALLOWED" if explanation["allowed"] else "BLOCKED"
    yield f"{explanation['source']} -> {explanation['target']} {explanation['service']}"
    yield f"  engine: {verdict} by {explanation['decidedBy']}"
    yield f"  packet from {ends['source']} to {ends['target']}: {seen}"
    match judge(explanation, seen):
        case True:
            yield "  they AGREE"
        case False:
            yield "  they DIFFER"
        case None:
            yield "  they cannot be compared"


def _ends(traced: Mapping[str, Any]) -> dict[str, str]:
    return {"source": traced["source"]["address"], "target": traced["target"]["address"]}


def _try_out(agent: str, traced: Mapping[str, Any]) -> Seen:
    node = inspect_agent(agent)
    tools = datapath_tools(node["datapath"])
    source, target, tenant = traced["source"], traced["target"], TenantName(traced["tenant"])
    if not source["netns"] or not target["address"]:
        raise CommandError(f"{source['identity']} cannot send to {target['identity']}: one of them has no address here")
    way = Way(source["address"], target["address"], traced["protocol"], traced["port"])
    with (
        open_probe(way, lambda: tools.enter_workload(Path(source["netns"]))) as probe,
        Tap(lambda: tools.enter(Path(node["runDir"]) / "netns", tenant)) as tap,
    ):
        return _watch(probe, tap, target_device=target["device"], refusals=_Refusals(agent, tenant, probe))


class _Refusals:
    """Asks the agent whether it was told of the probe's refusal."""

    def __init__(self, agent: str, tenant: TenantName, probe: Probe) -> None:
        self._agent, self._tenant, self._probe = agent, tenant, probe
        self._since = time.time() - _CLOCK_S

    def find(self) -> Seen | None:
        query = {"tenant": self._tenant, "pod": self._probe.way.source, "since": f"{self._since:.3f}"}
        drops: Sequence[Mapping[str, Any]] = decode_rows(ask_agent(self._agent, "/drops", **query))
        for drop in drops:
            if self._is_probe(drop):
                return Seen(Fate.REFUSED, drop["rule"], drop["reason"])
        return None

    def _is_probe(self, drop: Mapping[str, Any]) -> bool:
        way = self._probe.way
        found = (drop["source"]["address"], drop["target"]["address"], drop["protocol"])
        ports = (drop["source"]["port"], drop["target"]["port"])
        return found == (way.source, way.target, way.protocol) and (
            way.protocol not in PORTED or ports == (self._probe.own_port, way.port)
        )


def _watch(probe: Probe, tap: Tap, *, target_device: str, refusals: _Refusals) -> Seen:
    """Send until something is known for certain; a packet that left for another node is given time to be answered."""
    seen = Seen(Fate.UNSEEN)
    for _ in range(_TRIES):
        probe.send()
        deadline = time.monotonic() + _TRY_S
        while time.monotonic() < deadline:
            select.select([probe.mouth, tap.ear], [], [], _LOOK_S)
            if device := tap.left_by(probe):
                seen = Seen(Fate.ARRIVED if device == target_device else Fate.LEFT, device)
            if said := probe.answer():
                return Seen(Fate.ANSWERED, said)
            if seen.fate is Fate.ARRIVED:
                return seen
            if seen.fate is Fate.UNSEEN and (refused := refusals.find()):
                return refused
    return seen
