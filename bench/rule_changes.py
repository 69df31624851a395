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
import struct
import time
from statistics import median

from bench.figures import Figure, figure
from bench.flow_watch import FlowWatch
from weft.lab.hosts import Host, Pod
from weft.lab.namespaces import stepped_apart
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.openvswitch import Switch
from weft.lab.traffic import UDP
from weft.lab.waiting import DEADLINE

FEW, MANY = 100, 500
# Half of them open, half of them shut; the first ones meet cold code and an agent that is still busy with new pods.
CHANGES, NOT_COUNTED = 60, 20
TARGET_MS = 7.0
AT_ONCE = 8
_PORT = 4243
_NETWORK, _GROUP, _POLICY = "square", "crowd", "guard"
_KEY = f"default:{_POLICY}:open"
_OPEN = {"tenantName": "default", "policyName": _POLICY, "ruleId": "open", "direction": "in"} | {
    "protocol": "udp", "port": _PORT, "priority": 2, "action": "allow"
}  # fmt: skip
_PACE_S = 0.0003
# When nothing has arrived for so long, what was sent before is refused, and not late.
_QUIET_S = 0.05
# By then the node has forgotten what newcomers said first: Open vSwitch goes over all that it remembers of packets
# whenever a flow changes, which makes thousands of such a crowd.
_FORGOTTEN_S = 15.0
_NUMBER = struct.Struct("=Q")


class Way:
    """From one pod to another, by which packets go all the time. Each has a number, by which it is known when it comes.

    On a busy path they arrive later than the next ones are sent.
    """

    def __init__(self, mouth: socket.socket, ear: socket.socket, where: tuple[str, int]) -> None:
        self._mouth, self._ear, self._where = mouth, ear, where
        self._sent_at: list[float] = []
        self.begin()

    def begin(self) -> None:
        """What was sent before is of no concern any more."""
        self._arrived = len(self._sent_at) - 1
        self._arrived_at: float | None = None

    def go_on(self) -> None:
        """Send one more, and take what has arrived, waiting for it no longer than until the next one is due."""
        self._sent_at.append(time.perf_counter())
        self._mouth.sendto(_NUMBER.pack(len(self._sent_at) - 1), self._where)
        while select.select([self._ear], [], [], max(self._sent_at[-1] + _PACE_S - time.perf_counter(), 0))[0]:
            (number,) = _NUMBER.unpack(self._ear.recv(64))
            if number > self._arrived:
                self._arrived, self._arrived_at = number, time.perf_counter()

    def opened_at(self) -> float | None:
        """When a packet came."""
        return self._arrived_at

    def shut_at(self) -> float | None:
        """When the first packet was sent that did not come, nor any after it."""
        if self._arrived + 1 == len(self._sent_at):
            return None
        first = self._sent_at[self._arrived + 1]
        return first if self._sent_at[-1] > max(first, self._arrived_at or 0.0) + _QUIET_S else None


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
            await asyncio.sleep(_FORGOTTEN_S)
            times = await asyncio.to_thread(_change_all, lab.master.url, asks, answers)
            figures[f"rule change in force, {pods} pods"] = _figure(times)
            if host.switch is not None:
                times = await asyncio.to_thread(_change_flows, lab.master.url, host.switch)
                figures[f"rule change to flow, {pods} pods"] = _figure(times)
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


def _figure(times: list[float]) -> Figure:
    note = f"p50 of {CHANGES}, by REST on SQLite; fastest {min(times):.1f}, slowest {max(times):.1f}"
    return figure(median(times), unit="ms", target=TARGET_MS, note=note)


def _change_flows(url: str, switch: Switch) -> list[float]:
    """Milliseconds from each request until the switch has the flow, or has it no more."""
    rest = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE)
    times = []
    with FlowWatch(switch) as watch:
        for number in range(NOT_COUNTED + CHANGES):
            began = time.perf_counter()
            _ask(rest, opens=number % 2 == 0)
            times.append((watch.await_change() - began) * 1e3)
            _take_answer(rest)
    rest.close()
    return times[NOT_COUNTED:]


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
    way.begin()
    began = time.perf_counter()
    _ask(rest, opens=opens)
    while (in_force := way.opened_at() if opens else way.shut_at()) is None:
        if time.perf_counter() > began + DEADLINE:
            raise SystemExit("bench.rule_changes: the rule never came into force")
        way.go_on()
    _take_answer(rest)
    return (in_force - began) * 1e3


def _ask(rest: http.client.HTTPConnection, *, opens: bool) -> None:
    if opens:
        rest.request("PUT", f"/api/v1/rules/{_KEY}/", json.dumps(_OPEN), {"Content-Type": "application/json"})
    else:
        rest.request("DELETE", f"/api/v1/rules/{_KEY}/")


def _take_answer(rest: http.client.HTTPConnection) -> None:
    answer = rest.getresponse()
    answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"bench.rule_changes: netmaster answered {answer.status}")
