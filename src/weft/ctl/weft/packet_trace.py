"""`weft trace --packet`: sends a probe and compares what happens to it with the verdict of the policy engine.

The probe is sent from the workload's network namespace. This node captures it at the destination's host-side interface
or at the overlay, and the agent reports drops. Of another node only the reply is visible: a probe that was forwarded
and not answered may have been dropped there, which `weft drops` on that node shows.
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
from weft.ctl.weft.agent_client import get_agent, inspect_agent
from weft.ctl.weft.probes import Probe, ProbeFlow, Tap, open_probe
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import PORTED
from weft.drivers import datapath_tools

EXIT_AGREE, EXIT_DIFFER, EXIT_LOST = 0, 1, 6

# The first probe may be lost while neighbours are resolved; four seconds are more than ARP and ND need.
_TRIES = 4
_TRY_S = 1.0
_POLL_S = 0.1
# Drops carry the kernel's timestamps, which may be slightly before our own clock.
_CLOCK_SKEW_S = 1.0


class ProbeStatus(StrEnum):
    """What happened to a probe, as far as this node can see."""

    ANSWERED = "answered"
    DELIVERED = "delivered"
    FORWARDED = "forwarded"
    DROPPED = "dropped"
    LOST = "lost"


class ProbeResult(NamedTuple):
    """The status of a probe. `by` is the device, the reply, or the rule that dropped it."""

    status: ProbeStatus
    by: str = ""
    reason: str = ""

    @property
    def has_passed(self) -> bool:
        return self.status in {ProbeStatus.ANSWERED, ProbeStatus.DELIVERED, ProbeStatus.FORWARDED}

    def __str__(self) -> str:
        match self.status:
            case ProbeStatus.ANSWERED:
                return f"answered by {self.by}"
            case ProbeStatus.DELIVERED:
                return f"delivered to the destination's interface {self.by}"
            case ProbeStatus.FORWARDED:
                return f"forwarded through {self.by}; no reply, so the verdict of the destination's node is unknown"
            case ProbeStatus.DROPPED:
                return f"dropped by {self.by}: {self.reason}"
            case ProbeStatus.LOST:
                return "lost: seen on no device, and not reported as dropped"


def trace_packet(args: argparse.Namespace) -> tuple[int, dict[str, Any], str]:
    """Send a probe and compare; the exit code (0 agree, 1 differ, 6 lost) and both verdicts as JSON and text."""
    query = {"src": args.source, "dst": args.target, "service": args.service, "version": args.ipv6 or ""}
    traced = cast("dict[str, Any]", decode_row(get_agent(args.agent, "/trace", **query)))
    result = _send_probe(args.agent, traced)
    agree = agrees(traced["explanation"], result)
    code = {True: EXIT_AGREE, False: EXIT_DIFFER, None: EXIT_LOST}[agree]
    packet = {"status": result.status, "by": result.by, "reason": result.reason, **_addresses(traced)}
    document = {"engine": traced["explanation"], "packet": packet, "agree": agree}
    return code, document, "\n".join(format_comparison(traced, result))


def agrees(explanation: Mapping[str, Any], result: ProbeResult) -> bool | None:
    """Whether engine and packet agree on the verdict and, for a drop, on the rule; None for a lost packet."""
    if result.status is ProbeStatus.LOST:
        return None
    if explanation["allowed"]:
        return result.has_passed
    return result.status is ProbeStatus.DROPPED and result.by == explanation["decidedBy"]


def format_comparison(traced: Mapping[str, Any], result: ProbeResult) -> Iterator[str]:
    """Both verdicts and whether they agree, as lines of text."""
    explanation, addresses = traced["explanation"], _addresses(traced)
    verdict = "ALLOWED" if explanation["allowed"] else "BLOCKED"
    yield f"{explanation['source']} -> {explanation['target']} {explanation['service']}"
    yield f"  engine: {verdict} by {explanation['decidedBy']}"
    yield f"  packet from {addresses['source']} to {addresses['target']}: {result}"
    match agrees(explanation, result):
        case True:
            yield "  they AGREE"
        case False:
            yield "  they DIFFER"
        case None:
            yield "  they cannot be compared"


def _addresses(traced: Mapping[str, Any]) -> dict[str, str]:
    return {"source": traced["source"]["address"], "target": traced["target"]["address"]}


def _send_probe(agent: str, traced: Mapping[str, Any]) -> ProbeResult:
    node = inspect_agent(agent)
    tools = datapath_tools(node["datapath"])
    source, target, tenant = traced["source"], traced["target"], TenantName(traced["tenant"])
    # An endpoint without netns is a host or an external address, or is on another node.
    if not source["netns"] or not target["address"]:
        raise CommandError(f"{source['identity']} cannot send to {target['identity']}: one of them has no address here")
    flow = ProbeFlow(source["address"], target["address"], traced["protocol"], traced["port"])
    with (
        open_probe(flow, lambda: tools.enter_pod_netns(Path(source["netns"]))) as probe,
        Tap(lambda: tools.enter_tenant_netns(Path(node["runDir"]) / "netns", tenant)) as tap,
    ):
        return _watch(probe, tap, target_device=target["device"], drops=_ProbeDrops(agent, tenant, probe))


class _ProbeDrops:
    """Looks for drops of the probe in the agent's drop log."""

    def __init__(self, agent: str, tenant: TenantName, probe: Probe) -> None:
        self._agent, self._tenant, self._probe = agent, tenant, probe
        self._since = time.time() - _CLOCK_SKEW_S

    def find(self) -> ProbeResult | None:
        query = {"tenant": self._tenant, "pod": self._probe.flow.source, "since": f"{self._since:.3f}"}
        drops: Sequence[Mapping[str, Any]] = decode_rows(get_agent(self._agent, "/drops", **query))
        for drop in drops:
            if self._is_probe(drop):
                return ProbeResult(ProbeStatus.DROPPED, drop["rule"], drop["reason"])
        return None

    def _is_probe(self, drop: Mapping[str, Any]) -> bool:
        flow = self._probe.flow
        dropped = (drop["source"]["address"], drop["target"]["address"], drop["protocol"])
        ports = (drop["source"]["port"], drop["target"]["port"])
        return dropped == (flow.source, flow.target, flow.protocol) and (
            flow.protocol not in PORTED or ports == (self._probe.source_port, flow.port)
        )


def _watch(probe: Probe, tap: Tap, *, target_device: str, drops: _ProbeDrops) -> ProbeResult:
    """Send probes until the result is certain. A probe forwarded to another node gets time for a reply."""
    result = ProbeResult(ProbeStatus.LOST)
    for _ in range(_TRIES):
        probe.send()
        deadline = time.monotonic() + _TRY_S
        while time.monotonic() < deadline:
            select.select([probe.socket, tap.socket], [], [], _POLL_S)
            if device := tap.egress_device(probe):
                status = ProbeStatus.DELIVERED if device == target_device else ProbeStatus.FORWARDED
                result = ProbeResult(status, device)
            if reply := probe.reply():
                return ProbeResult(ProbeStatus.ANSWERED, reply)
            # Final, after the check for a reply, which says more.
            if result.status is ProbeStatus.DELIVERED:
                return result
            # Only while nothing else is known: it is a request to the agent.
            if result.status is ProbeStatus.LOST and (dropped := drops.find()):
                return dropped
    return result
