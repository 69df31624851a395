"""Pods start during a flood: no denied packet passes in either direction, and the first allowed packet is delivered.

The flood targets addresses before they are allocated and until their pods are deleted, and each pod floods denied
destinations from its start: on the same host and on the other one, in both families. CVE-2024-42488: a race at start-up
let packets pass before policy was installed; CVE-2023-27594: IPv6 was not covered.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product

import pytest
from tests.support.flood import Flood, FloodDatagram, Tap

from weft.domain.addresses import Address, parse_address
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP
from weft.lab.waiting import soon, until

OPEN, CLOSED = 5000, 6000
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
NO_ADDRESSES = {4: Address(4, 0), 6: Address(6, 0)}
LATE_S = 0.2
# The number of target addresses: that of the previous pod, which may be reused, and those after it.
AHEAD = 3
ROLES = ("friend", "foe", "vault", "closed")
# New pods have policy: only `friends` may connect to one port, and they may connect to all pods but `vaults`.
POLICIES = {"policed": ["guard"], "closed": ["close"]}
RULES: Mapping[str, Sequence[Mapping[str, object]]] = {
    "guard": [
        {"direction": "in", "priority": 1, "action": "deny"},
        {"direction": "in", "priority": 2, "action": "allow", "fromEndpointGroup": "friend", "protocol": "udp"}
        | {"port": OPEN},
        {"direction": "out", "priority": 2, "action": "deny", "toEndpointGroup": "vault"},
    ],
    "close": [{"direction": "in", "priority": 1, "action": "deny", "fromEndpointGroup": "policed"}],
}


async def create_pods(lab: NetLab) -> dict[str, list[Pod]]:
    """Create a pod of each role on each host."""
    await lab.network("net", subnet="10.1.0.0/16", ipv6Subnet="2001:db8:1::/64")
    for name in RULES:
        (await lab.rest.put("policys", tenantName="default", policyName=name)).accepted()
    for group in ("policed", *ROLES):
        await lab.group(group, network="net", policies=POLICIES.get(group, []))
    for name, rules in RULES.items():
        for number, rule in enumerate(rules, start=1):
            key = {"tenantName": "default", "policyName": name, "ruleId": str(number)}
            (await lab.rest.put("rules", **key, **rule)).accepted()
    hosts = await asyncio.gather(lab.host("one"), lab.host("two"))
    return {
        role: [await host.pod(f"{role}-{host.name}", group=role, network="net") for host in hosts] for role in ROLES
    }


def addresses(pods: Sequence[Pod]) -> set[Address]:
    return {parse_address(str(pod.address(family)), field="pod") for pod, family in product(pods, FAMILIES)}


def send(nonce: bytes, source: Pod, target: Pod, *, family: int) -> None:
    with source.place(family).open_client(UDP) as sender:
        sender.sendto(nonce, (str(target.address(family)), OPEN))


async def receive(nonce: bytes, listener: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(listener, 64) != nonce:
        pass


class StartRun:
    """The flood, the taps and the counters."""

    def __init__(self, pods: Mapping[str, Sequence[Pod]], stack: ExitStack) -> None:
        self._friends = pods["friend"]
        self._targets = (*pods["vault"], *pods["closed"])
        self._foes_addresses = addresses(pods["foe"])
        self._friends_addresses = addresses(self._friends)
        self._taps = [stack.enter_context(Tap(pod.namespace)) for pod in self._targets]
        self._listeners = {
            (friend, family): stack.enter_context(friend.place(family).listening(OPEN, UDP))
            for friend, family in product(self._friends, FAMILIES)
        }
        # `foes` may not reach new pods, and `friends` only on the open port.
        self._clients = [
            (family, port, stack.enter_context(pod.place(family).open_client(UDP)))
            for role, port in (("foe", OPEN), ("foe", CLOSED), ("friend", CLOSED))
            for pod, family in product(pods[role], FAMILIES)
        ]
        self._flood = stack.enter_context(Flood())
        self.forbidden: Counter[str] = Counter()
        # Starts whose addresses were flooded before they were allocated.
        self.flooded = 0

    async def start(self, host: Host, name: str, *recent: Mapping[int, Address]) -> Mapping[int, Address]:
        """Create, check and delete a pod, and return its addresses. `recent` has addresses that may be reused."""
        likely = {
            family: {Address(family, last[family].number + ahead) for last in recent for ahead in range(AHEAD)}
            for family in FAMILIES
        }
        with ExitStack() as stack:
            namespace = stack.enter_context(Namespace.open(host.make_netns(name)))
            tap = stack.enter_context(Tap(namespace))
            own = {
                family: stack.enter_context(namespace.open_socket(kind, socket.SOCK_DGRAM))
                for family, kind in FAMILIES.items()
            }
            for sender in own.values():
                sender.setblocking(False)
            to_pod = [
                FloodDatagram(sender, str(each), port)
                for family, port, sender in self._clients
                for each in likely[family]
            ]
            from_pod = [
                FloodDatagram(sender, str(pod.address(family)), CLOSED)
                for pod, (family, sender) in product(self._targets, own.items())
            ]
            self._flood.datagrams = (*to_pod, *from_pod)
            await self._flood_round()
            pod = await host.pod(name, group="policed", network="net")
            await self._exchange_first_packets(pod)
            await self._flood_round()
            await pod.detach()
            await self._flood_round()
            self._count_leaks(tap)
        host.remove_netns(name)
        allocated = {each.family: each for each in addresses([pod])}
        self.flooded += all(allocated[family] in likely[family] for family in FAMILIES)
        return allocated

    async def _flood_round(self) -> None:
        """Return after a complete round of the flood."""
        target = self._flood.rounds + 2
        await until(lambda: self._flood.rounds >= target)

    def _count_leaks(self, tap: Tap) -> None:
        """Count denied packets that arrived."""
        for packet in tap.packets():
            if packet.source in self._foes_addresses:
                self.forbidden[f"a foe to a new pod: {packet}"] += 1
            elif packet.source in self._friends_addresses and packet.target_port == CLOSED:
                self.forbidden[f"a friend to a new pod: {packet}"] += 1
        for each in self._taps:
            for packet in each.packets():
                if packet.target_port == CLOSED:
                    self.forbidden[f"a new pod: {packet}"] += 1

    async def _exchange_first_packets(self, pod: Pod) -> None:
        """Exchange one packet each way between a new pod and its friends, without retries.

        Only a friend on the other host may have to retry, as its host must learn the new endpoint first.
        """
        near, far = self._friends
        nonce = pod.name.encode()
        for family in FAMILIES:
            with pod.place(family).listening(OPEN, UDP) as listener:
                send(nonce, near, pod, family=family)
                for friend in (near, far):
                    send(nonce, pod, friend, family=family)
                    await soon(receive(nonce, self._listeners[friend, family]))
                await soon(receive(nonce, listener))
                await self._send_until_received(far, pod, listener, family=family)

    async def _send_until_received(self, friend: Pod, pod: Pod, listener: socket.socket, *, family: int) -> None:
        nonce = friend.name.encode()
        received = asyncio.ensure_future(soon(receive(nonce, listener)))
        send(nonce, friend, pod, family=family)
        while not (await asyncio.wait([received], timeout=LATE_S))[0]:
            send(nonce, friend, pod, family=family)
        await received


async def run_starts(lab: NetLab, *, starts: int) -> None:
    with ExitStack() as stack:
        run = StartRun(await create_pods(lab), stack)
        before: Mapping[int, Address] = NO_ADDRESSES
        last: Mapping[int, Address] = NO_ADDRESSES
        for number in range(starts):
            before, last = last, await run.start(lab.hosts["one"], f"new{number}", before, last)
            assert not run.forbidden, f"in start {number}: {run.forbidden}"
    assert run.flooded > starts * 3 // 4


@pytest.mark.timeout(600)
async def test_two_hundred_starts(lab: NetLab) -> None:
    await run_starts(lab, starts=200)


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_ten_thousand_starts(lab: NetLab) -> None:
    await run_starts(lab, starts=10_000)
