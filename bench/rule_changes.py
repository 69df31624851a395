"""Latency of a rule change: from the REST request until packets obey the rule, on a node with many pods.

A pod sends to another continuously while a rule that allows the flow is created or deleted. Both are in the group whose
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
from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.openvswitch import Switch
from weft.lab.traffic import UDP
from weft.lab.waiting import DEADLINE

FEW, MANY = 100, 500
# Half of them allow, half of them deny; the first ones warm up, while the agent is still busy with new pods.
CHANGES, NOT_COUNTED = 60, 20
TARGET_MS = 7.0
AT_ONCE = 8
_PORT = 4243
_NETWORK, _GROUP, _POLICY = "net", "pods", "policy"
_KEY = f"default:{_POLICY}:open"
_OPEN = {"tenantName": "default", "policyName": _POLICY, "ruleId": "open", "direction": "in"} | {
    "protocol": "udp", "port": _PORT, "priority": 2, "action": "allow"
}  # fmt: skip
_PACE_S = 0.0003
# After this time without an arrival, earlier packets are dropped and not late.
_QUIET_S = 0.05
# OVS expires the megaflows of the new pods' first packets within this time: it revalidates all of them whenever
# a flow changes, and so many pods have thousands.
_MEGAFLOW_EXPIRY_S = 15.0
_NUMBER = struct.Struct("=Q")


class PacketStream:
    """Numbered packets from one pod to another.

    On a busy path packets arrive after the next ones are sent.
    """

    def __init__(self, sender: socket.socket, listener: socket.socket, destination: tuple[str, int]) -> None:
        self._sender, self._listener, self._destination = sender, listener, destination
        self._sent_at: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Ignore the packets sent so far."""
        self._arrived = len(self._sent_at) - 1
        self._arrived_at: float | None = None

    def send_next(self) -> None:
        """Send one packet, and receive until the next one is due."""
        self._sent_at.append(time.perf_counter())
        self._sender.sendto(_NUMBER.pack(len(self._sent_at) - 1), self._destination)
        while select.select([self._listener], [], [], max(self._sent_at[-1] + _PACE_S - time.perf_counter(), 0))[0]:
            (number,) = _NUMBER.unpack(self._listener.recv(64))
            if number > self._arrived:
                self._arrived, self._arrived_at = number, time.perf_counter()

    def allowed_at(self) -> float | None:
        """The arrival time of the latest packet."""
        return self._arrived_at

    def denied_at(self) -> float | None:
        """The send time of the first packet after which none arrived."""
        if self._arrived + 1 == len(self._sent_at):
            return None
        first = self._sent_at[self._arrived + 1]
        return first if self._sent_at[-1] > max(first, self._arrived_at or 0.0) + _QUIET_S else None


def run(*, datapath: str = "linux") -> dict[str, Figure]:
    """Measure on nodes of a datapath, as root."""
    with private_namespaces():
        return asyncio.run(_measure(datapath))


async def _measure(datapath: str) -> dict[str, Figure]:
    async with open_lab(datapath=datapath) as lab:
        await lab.network(_NETWORK, subnet="10.7.0.0/16")
        await _write_policy(lab)
        host = await lab.host("one")
        client, server = [await host.pod(name, network=_NETWORK, group=_GROUP) for name in ("client", "server")]
        figures: dict[str, Figure] = {}
        there = 2
        for pods in (FEW, MANY):
            await _fill(host, there, pods)
            there = pods
            await asyncio.sleep(_MEGAFLOW_EXPIRY_S)  # the expiry of a cached flow is no event
            times = await asyncio.to_thread(_change_all, lab.master.url, client, server)
            figures[f"policy change to packet, {pods} pods"] = _figure(times)
            if host.switch is not None:
                times = await asyncio.to_thread(_change_flows, lab.master.url, host.switch)
                figures[f"policy change to flow, {pods} pods"] = _figure(times)
        return figures


async def _write_policy(lab: NetLab) -> None:
    (await lab.rest.put("policys", tenantName="default", policyName=_POLICY)).accepted()
    await lab.group(_GROUP, network=_NETWORK, policies=[_POLICY])
    deny = {"tenantName": "default", "policyName": _POLICY, "ruleId": "deny", "direction": "in", "action": "deny"}
    (await lab.rest.put("rules", **deny, priority=1)).accepted()


async def _fill(host: Host, there: int, wanted: int) -> None:
    """Attach more pods of the same group."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def attach(number: int) -> None:
        async with turns:
            await host.pod(f"pod-{number}", network=_NETWORK, group=_GROUP)

    await asyncio.gather(*(attach(number) for number in range(there, wanted)))


def _figure(times: list[float]) -> Figure:
    note = f"p50 of {CHANGES}, by REST on SQLite; fastest {min(times):.1f}, slowest {max(times):.1f}"
    return figure(median(times), unit="ms", target=TARGET_MS, note=note)


def _change_flows(url: str, switch: Switch) -> list[float]:
    """Milliseconds from each request until the switch has added or deleted the flow."""
    rest = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE)
    times = []
    with FlowWatch(switch) as watch:
        for number in range(NOT_COUNTED + CHANGES):
            began = time.perf_counter()
            _request(rest, allow=number % 2 == 0)
            times.append((watch.await_change() - began) * 1e3)
            _read_response(rest)
    rest.close()
    return times[NOT_COUNTED:]


def _change_all(url: str, client: Pod, server: Pod) -> list[float]:
    """Milliseconds of each change, without the warm-up."""
    rest = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE)
    target = server.place()
    with client.place().open_client(UDP) as sender, target.listening(_PORT, UDP) as listener:
        stream = PacketStream(sender, listener, (str(target.address), _PORT))
        times = [_change(rest, stream, allow=number % 2 == 0) for number in range(NOT_COUNTED + CHANGES)]
    rest.close()
    return times[NOT_COUNTED:]


def _change(rest: http.client.HTTPConnection, stream: PacketStream, *, allow: bool) -> float:
    """Milliseconds from the request until the first packet passes, or until the first dropped packet is sent."""
    stream.begin()
    began = time.perf_counter()
    _request(rest, allow=allow)
    while (obeyed_at := stream.allowed_at() if allow else stream.denied_at()) is None:
        if time.perf_counter() > began + DEADLINE:
            raise SystemExit("bench.rule_changes: the rule was never enforced")
        stream.send_next()
    _read_response(rest)
    return (obeyed_at - began) * 1e3


def _request(rest: http.client.HTTPConnection, *, allow: bool) -> None:
    if allow:
        rest.request("PUT", f"/api/v1/rules/{_KEY}/", json.dumps(_OPEN), {"Content-Type": "application/json"})
    else:
        rest.request("DELETE", f"/api/v1/rules/{_KEY}/")


def _read_response(rest: http.client.HTTPConnection) -> None:
    answer = rest.getresponse()
    answer.read()
    if answer.status != http.HTTPStatus.OK:
        raise SystemExit(f"bench.rule_changes: netmaster answered {answer.status}")
