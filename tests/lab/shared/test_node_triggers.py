"""What befalls a cluster (contiv 10.9: T2 to T8) with policy in force throughout: real agents, two masters, one etcd.

T1 is about uplinks (`tests/lab/ovs/test_ovs_uplinks.py`). T4 differs: liveness is status, not routing.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import pytest_asyncio
from tests.support import inventory
from tests.support.connectivity import assert_connectivity, between
from tests.support.modes import TOWNS_ALL_IN_SOAK, TOWNS_ON_ALL
from tests.support.tenant_fixture import TenantFixture

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.servers.masters import MasterProcess, client
from weft.lab.waiting import DEADLINE, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

STORE = "etcd"
_numbers = itertools.count(1)


class Masters:
    """Two netmasters on the lab's etcd: its own, and a second one that may be replaced."""

    def __init__(self, lab: NetLab, stack: AsyncExitStack) -> None:
        self._lab = lab
        self._stack = stack
        self.all = [lab.master]

    async def add(self) -> MasterProcess:
        """One more, at an address of its own."""
        etcd = self._lab.etcd
        assert etcd is not None
        directory = self._lab.directory / f"master{len(self.all)}-{next(_numbers)}"
        flags = ("--etcd-endpoints", ",".join(etcd.endpoints), "--leader-ttl", "2")
        added = await self._stack.enter_async_context(
            MasterProcess(directory, "--store-socket", str(directory / "store.sock"), *flags)
        )
        self.all.append(added)
        return added

    async def leader(self, asked: MasterProcess) -> MasterProcess | None:
        """Who leads, as one of them knows it."""
        async with client(asked.url) as rest:
            address = (await rest.send("GET", "/info")).accepted()["leader-ip"]
        return next((each for each in self.all if each.address == address), None)


class Streets:
    """A town whose group `web` is open on one TCP port only, on two hosts."""

    def __init__(self, town: TenantFixture) -> None:
        self.town = town
        self.web: list[Pod] = []
        self.others: list[Pod] = []

    async def settle(self) -> None:
        await self.town.build()
        await self.town.policy("some", "-d in -l tcp -p 1 -j deny", "-d in -l tcp -P 8000 -p 100 -j allow")
        await self.town.group("web", "some")
        self.web, self.others = await self.town.pods("web"), await self.town.pods()

    async def are_policed(self) -> None:
        """What may pass does, and what may not does not."""
        await assert_connectivity(
            passing=between(self.others, self.web, "tcp/8000", "udp/53"),
            refused=between([*self.others, *self.web], self.web, "tcp/80"),
        )

    async def change(self) -> None:
        """The rules can be changed, and the change is in force when that returns."""
        await self.town.rule("some", "3", "-d in -l tcp -P 9000 -p 100 -j allow")
        await assert_connectivity(passing=between(self.others, self.web, "tcp/9000"))
        await self.town.drop_rule("some", "3")
        await assert_connectivity(refused=between(self.others, self.web, "tcp/9000"))

    async def renew(self, host: Host) -> None:
        """Pods of a host end and others come."""
        for pods in (self.web, self.others):
            for pod in [pod for pod in pods if pod.host is host]:
                await pod.remove()
                pods.remove(pod)
        await self.join(host)

    async def join(self, host: Host) -> None:
        """More pods on a host."""
        self.web.append(await self.town.pod(host, "web"))
        self.others.append(await self.town.pod(host))


@pytest_asyncio.fixture(loop_scope="module")
async def streets(lab: NetLab, found: Callable[[], TenantFixture]) -> AsyncIterator[Streets]:
    streets = Streets(found())
    await streets.settle()
    await streets.are_policed()
    try:
        yield streets
        for pod in (*streets.web, *streets.others):
            await pod.remove()
        await inventory.settled(lab)
    finally:
        lab.tell_logs()


@asynccontextmanager
async def more_masters(lab: NetLab) -> AsyncIterator[Masters]:
    async with AsyncExitStack() as stack:
        yield Masters(lab, stack)


@TOWNS_ALL_IN_SOAK
async def test_t2_the_leader_is_killed_and_another_takes_over(lab: NetLab, streets: Streets) -> None:
    async with more_masters(lab) as masters:
        second = await masters.add()
        assert await eventually(lambda: masters.leader(second), bool) is lab.master
        lab.master.kill()
        await streets.are_policed()
        await streets.join(lab.hosts["one"])
        await eventually(lambda: masters.leader(second), lambda leader: leader is second)
        streets.town.url = second.url
        await streets.change()
        await streets.are_policed()
        await lab.master.start()
        streets.town.url = lab.master.url
        await streets.change()


@TOWNS_ALL_IN_SOAK
async def test_t3_all_masters_move_to_other_ports(lab: NetLab, streets: Streets) -> None:
    """Agents follow the store, not an address of a master."""
    async with more_masters(lab) as masters:
        lab.master.kill()
        for _ in range(2):
            streets.town.url = (await masters.add()).url
        await streets.change()
        await streets.renew(lab.hosts["two"])
        await streets.are_policed()
    await lab.master.start()


@TOWNS_ALL_IN_SOAK
async def test_t4_an_agent_that_is_away_is_shown_silent_and_moves_no_route(lab: NetLab, streets: Streets) -> None:
    """Contiv took the peer's tunnel away. Here packets go on both ways, under the policy that was in force."""
    two = lab.hosts["two"]

    async def state() -> str:
        rows = (await lab.rest.get("nodes")).accepted()
        return str(next(row["status"]["state"] for row in rows if row["name"] == "two"))

    two.kill()
    await eventually(state, lambda shown: shown == "silent")
    await streets.are_policed()
    await streets.join(lab.hosts["one"])
    await two.start()
    await eventually(state, lambda shown: shown == "alive")
    await streets.are_policed()
    await streets.change()


@TOWNS_ON_ALL
async def test_t5_a_node_is_rebooted(lab: NetLab, streets: Streets) -> None:
    """Its pods are gone with it; those that come are policed on both hosts from their first packet on."""
    one = lab.hosts["one"]
    pull_cable(one)
    await lab.reboot(one)
    for pods in (streets.web, streets.others):
        pods[:] = [pod for pod in pods if pod.host is not one]
    await streets.are_policed()
    await streets.join(one)
    await streets.are_policed()
    await streets.change()


def pull_cable(host: Host) -> None:
    """A machine without power says nothing; its kernel here lives on for a while in the connections of its agent."""
    subprocess.run(["ip", "link", "set", host.cable, "down"], check=True, timeout=DEADLINE)


@TOWNS_ALL_IN_SOAK
async def test_t6_the_store_is_restarted(lab: NetLab, streets: Streets) -> None:
    assert lab.etcd is not None
    lab.etcd.members[0].kill()
    await streets.are_policed()
    await streets.join(lab.hosts["one"])
    await assert_connectivity(refused=between(streets.others, streets.web, "tcp/80"))
    await lab.etcd.restart()
    await lab.rest.ready()
    await streets.change()
    await streets.are_policed()


@TOWNS_ALL_IN_SOAK
@pytest.mark.parametrize("times", [4, pytest.param(25, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_t7_the_cable_of_a_node_flaps(lab: NetLab, streets: Streets, times: int) -> None:
    """Cut off from the store and from the other host, again and again: nothing forbidden passes at any time."""
    two = lab.hosts["two"]
    others, web = [[pod for pod in pods if pod.host is two] for pods in (streets.others, streets.web)]
    for _ in range(times):
        await lab.partition(two)
        await assert_connectivity(
            passing=between(others, web, "tcp/8000"), refused=between(streets.others, streets.web, "tcp/80")
        )
        lab.heal(two)
        await asyncio.sleep(0.5)  # a flapping cable: too short for some things to recover, long enough for others
    await streets.are_policed()
    await streets.change()


@TOWNS_ALL_IN_SOAK
@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_t8_restarts_at_random_with_policy_checks(lab: NetLab, streets: Streets, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201  shown when it fails
    dice = random.Random(seed)

    async def restart_agent(host: Host) -> None:
        host.kill()
        await streets.are_policed()
        await host.start()

    async def restart_master(_: Host) -> None:
        await lab.master.start()

    async def restart_store(_: Host) -> None:
        assert lab.etcd is not None
        await lab.etcd.restart()
        await lab.rest.ready()

    deeds: list[Callable[[Host], Awaitable[None]]] = [restart_agent, restart_master, restart_store, streets.renew]
    for deed in [*deeds, *dice.choices(deeds, k=rounds)][:rounds]:
        await deed(dice.choice([*lab.hosts.values()]))
        await streets.are_policed()
    await streets.change()
