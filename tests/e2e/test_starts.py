"""Pods start under fire: nothing forbidden comes to them or from them, and the first allowed packet passes.

A flood aims at addresses before anybody has them and until their pods are gone, and each pod floods what it must not
reach from its first moment on: on the same host and on the other one, in both families. CVE-2024-42488: a race at the
start let packets pass before policy was there; CVE-2023-27594: it was another story in IPv6.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import product

import pytest
from tests.support.flood import Flood, Shot, Tap

from weft.domain.addresses import Address, parse_address
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP
from weft.lab.waiting import soon, until

OPEN, SHUT = 5000, 6000
FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
NOBODY = {4: Address(4, 0), 6: Address(6, 0)}
LATE_S = 0.2
# At how many addresses the flood aims: that of the pod before, which may be given again, and those after it.
AHEAD = 3
ROLES = ("friend", "foe", "vault", "closed")
# Newcomers are guarded: only friends may speak to them, on one port, and they may speak to everyone but vaults.
POLICIES = {"guarded": ["guard"], "closed": ["close"]}
RULES: Mapping[str, Sequence[Mapping[str, object]]] = {
    "guard": [
        {"direction": "in", "priority": 1, "action": "deny"},
        {"direction": "in", "priority": 2, "action": "allow", "fromEndpointGroup": "friend", "protocol": "udp"}
        | {"port": OPEN},
        {"direction": "out", "priority": 2, "action": "deny", "toEndpointGroup": "vault"},
    ],
    "close": [{"direction": "in", "priority": 1, "action": "deny", "fromEndpointGroup": "guarded"}],
}


async def establish(lab: NetLab) -> dict[str, list[Pod]]:
    """A pod of each role on each host."""
    await lab.network("net", subnet="10.1.0.0/16", ipv6Subnet="2001:db8:1::/64")
    for name in RULES:
        (await lab.rest.put("policys", tenantName="default", policyName=name)).accepted()
    for group in ("guarded", *ROLES):
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


def say(word: bytes, source: Pod, target: Pod, *, family: int) -> None:
    with source.place(family).open_caller(UDP) as mouth:
        mouth.sendto(word, (str(target.address(family)), OPEN))


async def hear(word: bytes, ear: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(ear, 64) != word:
        pass


class Siege:
    """The flood, the taps, and what was seen."""

    def __init__(self, pods: Mapping[str, Sequence[Pod]], stack: ExitStack) -> None:
        self._friends = pods["friend"]
        self._targets = (*pods["vault"], *pods["closed"])
        self._foes_addresses = addresses(pods["foe"])
        self._friends_addresses = addresses(self._friends)
        self._taps = [stack.enter_context(Tap(pod.namespace)) for pod in self._targets]
        self._ears = {
            (friend, family): stack.enter_context(friend.place(family).listening(OPEN, UDP))
            for friend, family in product(self._friends, FAMILIES)
        }
        # Foes may say nothing to newcomers, and friends nothing but on the open port.
        self._mouths = [
            (family, port, stack.enter_context(pod.place(family).open_caller(UDP)))
            for role, port in (("foe", OPEN), ("foe", SHUT), ("friend", SHUT))
            for pod, family in product(pods[role], FAMILIES)
        ]
        self._flood = stack.enter_context(Flood())
        self.forbidden: Counter[str] = Counter()
        # Starts with addresses at which the flood aimed before they were given.
        self.aimed = 0

    async def start(self, host: Host, name: str, *recent: Mapping[int, Address]) -> Mapping[int, Address]:
        """The whole life of a pod; its addresses. `recent` has those of pods before, of which some may come back."""
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
            for mouth in own.values():
                mouth.setblocking(False)
            at_it = [Shot(mouth, str(each), port) for family, port, mouth in self._mouths for each in likely[family]]
            by_it = [
                Shot(mouth, str(pod.address(family)), SHUT)
                for pod, (family, mouth) in product(self._targets, own.items())
            ]
            self._flood.shots = (*at_it, *by_it)
            await self._flood_comes()
            pod = await host.pod(name, group="guarded", network="net")
            await self._exchange_first_packets(pod)
            await self._flood_comes()
            await pod.detach()
            await self._flood_comes()
            self._look(tap)
        host.remove_netns(name)
        given = {each.family: each for each in addresses([pod])}
        self.aimed += all(given[family] in likely[family] for family in FAMILIES)
        return given

    async def _flood_comes(self) -> None:
        """Return after a whole wave."""
        whole = self._flood.waves + 2
        await until(lambda: self._flood.waves >= whole)

    def _look(self, tap: Tap) -> None:
        """Count what came and should not have."""
        for packet in tap.seen():
            if packet.source in self._foes_addresses:
                self.forbidden[f"a foe to a newcomer: {packet}"] += 1
            elif packet.source in self._friends_addresses and packet.target_port == SHUT:
                self.forbidden[f"a friend to a newcomer: {packet}"] += 1
        for each in self._taps:
            for packet in each.seen():
                if packet.target_port == SHUT:
                    self.forbidden[f"a newcomer: {packet}"] += 1

    async def _exchange_first_packets(self, pod: Pod) -> None:
        """One packet each way between a newcomer and its friends, and no second try.

        Only a friend on the other host may have to say it again: its host has to hear of the newcomer first.
        """
        near, far = self._friends
        word = pod.name.encode()
        for family in FAMILIES:
            with pod.place(family).listening(OPEN, UDP) as ear:
                say(word, near, pod, family=family)
                for friend in (near, far):
                    say(word, pod, friend, family=family)
                    await soon(hear(word, self._ears[friend, family]))
                await soon(hear(word, ear))
                await self._say_until_heard(far, pod, ear, family=family)

    async def _say_until_heard(self, friend: Pod, pod: Pod, ear: socket.socket, *, family: int) -> None:
        word = friend.name.encode()
        heard = asyncio.ensure_future(soon(hear(word, ear)))
        say(word, friend, pod, family=family)
        while not (await asyncio.wait([heard], timeout=LATE_S))[0]:
            say(word, friend, pod, family=family)
        await heard


async def besiege(lab: NetLab, *, starts: int) -> None:
    with ExitStack() as stack:
        siege = Siege(await establish(lab), stack)
        before: Mapping[int, Address] = NOBODY
        last: Mapping[int, Address] = NOBODY
        for number in range(starts):
            before, last = last, await siege.start(lab.hosts["one"], f"new{number}", before, last)
            assert not siege.forbidden, f"in start {number}: {siege.forbidden}"
    assert siege.aimed > starts * 3 // 4


@pytest.mark.timeout(600)
async def test_two_hundred_starts(lab: NetLab) -> None:
    await besiege(lab, starts=200)


@pytest.mark.soak
@pytest.mark.timeout(7200)
async def test_ten_thousand_starts(lab: NetLab) -> None:
    await besiege(lab, starts=10_000)
