"""How soon a changed rule is in force: from the request to netmaster until a packet meets it, on a node with many pods.

A pod asks another without pause while the rule is written that opens or shuts the way. Both are in the group whose
policy changes, and so are all other pods of the node.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import socket
import time
from statistics import median
from typing import NamedTuple

from bench.figures import Figure, figure
from weft.testing.apart import stepped_apart
from weft.testing.hosts import Host, Pod
from weft.testing.netlab import NetLab, open_lab
from weft.testing.traffic import UDP
from weft.testing.waiting import DEADLINE

FEW, MANY = 100, 500
CHANGES, NOT_COUNTED = 60, 20
"""Half of them open, half of them shut; the first ones meet cold code and an agent that is still busy with new pods."""
TARGET_MS = 7.0
AT_ONCE = 8
_PORT = 4243
_NETWORK, _GROUP, _POLICY = "square", "crowd", "guard"
_KEY = f"default:{_POLICY}:open"
_OPEN = {"tenantName": "default", "policyName": _POLICY, "ruleId": "open", "direction": "in"} | {
    "protocol": "udp", "port": _PORT, "priority": 2, "action": "allow"
}  # fmt: skip
_PACE_S = 0.0003
_ENOUGH = 5
"""So many packets in a row that do not arrive are refused, and not late."""


class Way(NamedTuple):
    """From one pod to another, by which packets go all the time."""

    mouth: socket.socket
    ear: socket.socket
    where: tuple[str, int]

    def passes(self) -> bool:
        """Whether a packet arrives that is sent now."""
        self.mouth.sendto(b"?", self.where)
        if not select.select([self.ear], [], [], _PACE_S)[0]:
            return False
        self.ear.recv(64)
        return True


def run(*, datapath: str = "linux") -> dict[str, Figure]:
    """On nodes of a datapath. The caller is root."""
    with stepped_apart():
        return asyncio.run(_measure(datapath))


async def _measure(datapath: str) -> dict[str, Figure]:
    async with open_lab(datapath=datapath) as lab:
        await lab.network(_NETWORK, subnet="10.7.0.0/16")
        await _write_ground(lab)
        host = await lab.host("one")
        asks, answers = [await host.pod(name, network=_NETWORK, group=_GROUP) for name in ("asks", "answers")]
        figures: dict[str, Figure] = {}
        there = 2
        for pods in (FEW, MANY):
            await _fill(host, there, pods)
            there = pods
            times = await asyncio.to_thread(_change_all, lab.master.url, asks, answers)
            figures[f"rule change in force, {pods} pods"] = figure(
                median(times),
                unit="ms",
                target=TARGET_MS,
                note=f"p50 of {CHANGES}, by REST on SQLite; {_spread(times)}",
            )
        return figures


async def _write_ground(lab: NetLab) -> None:
    (await lab.rest.put("policys", tenantName="default", policyName=_POLICY)).accepted()
    await lab.group(_GROUP, network=_NETWORK, policies=[_POLICY])
    shut = {"tenantName": "default", "policyName": _POLICY, "ruleId": "shut", "direction": "in", "action": "deny"}
    (await lab.rest.put("rules", **shut, priority=1)).accepted()


async def _fill(host: Host, there: int, wanted: int) -> None:
    """More pods of the same group."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def attach(number: int) -> None:
        async with turns:
            await host.pod(f"crowd-{number}", network=_NETWORK, group=_GROUP)

    await asyncio.gather(*(attach(number) for number in range(there, wanted)))


def _change_all(url: str, asks: Pod, answers: Pod) -> list[float]:
    """Milliseconds of each change that counts."""
    rest = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE)
    target = answers.place()
    with asks.place().open_caller(UDP) as mouth, target.listening(_PORT, UDP) as ear:
        way = Way(mouth, ear, (str(target.address), _PORT))
        times = [_change(rest, way, opens=number % 2 == 0) for number in range(NOT_COUNTED + CHANGES)]
    rest.close()
    return times[NOT_COUNTED:]


def _change(rest: http.client.HTTPConnection, way: Way, *, opens: bool) -> float:
    """From the request until the first packet passes, or until the first of those is sent that do not any more."""
    began = time.perf_counter()
    if opens:
        rest.request("PUT", f"/api/v1/rules/{_KEY}/", json.dumps(_OPEN), {"Content-Type": "application/json"})
    else:
        rest.request("DELETE", f"/api/v1/rules/{_KEY}/")
    in_force, met = began, 0
    while met < (1 if opens else _ENOUGH):
        sent = time.perf_counter()
        if sent > began + DEADLINE:
            raise SystemExit("bench.rule_changes: the rule never came into force")
        if way.passes() is not opens:
            met = 0
            continue
        in_force = (time.perf_counter() if opens else sent) if met == 0 else in_force
        met += 1
    answer = rest.getresponse()
    answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"bench.rule_changes: netmaster answered {answer.status}")
    return (in_force - began) * 1e3


def _spread(times: list[float]) -> str:
    return f"fastest {min(times):.1f}, slowest {max(times):.1f}"
