"""Contiv's fault scenarios T2 to T8 (contiv 10.9) with enforced policy: real agents, two masters, one etcd.

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
    """Two netmasters on the lab's etcd: the lab's own, and a second one that may be replaced."""

    def __init__(self, lab: NetLab, stack: AsyncExitStack) -> None:
        self._lab = lab
        self._stack = stack
        self.all = [lab.master]

    async def add(self) -> MasterProcess:
        """Start another netmaster at its own address."""
        etcd = self._lab.etcd
        assert etcd is not None
        directory = self._lab.directory / f"master{len(self.all)}-{next(_numbers)}"
        flags = ("--etcd-endpoints", ",".join(etcd.endpoints), "--leader-ttl", "2")
        added = await self._stack.enter_async_context(
            MasterProcess(directory, "--store-socket", str(directory / "store.sock"), *flags)
        )
        self.all.append(added)
        return added

    async def leader(self, master: MasterProcess) -> MasterProcess | None:
        """The leader according to one of them."""
        async with client(master.url) as rest:
            address = (await rest.send("GET", "/info")).accepted()["leader-ip"]
        return next((each for each in self.all if each.address == address), None)


class PolicedTenant:
    """A tenant whose group `web` allows one TCP port only, on two hosts."""

    def __init__(self, testbed: TenantFixture) -> None:
        self.testbed = testbed
        self.web: list[Pod] = []
        self.others: list[Pod] = []

    async def build(self) -> None:
        await self.testbed.build()
        await self.testbed.policy("some", "-d in -l tcp -p 1 -j deny", "-d in -l tcp -P 8000 -p 100 -j allow")
        await self.testbed.group("web", "some")
        self.web, self.others = await self.testbed.pods("web"), await self.testbed.pods()

    async def assert_policy_enforced(self) -> None:
        """Assert allowed and denied flows."""
        await assert_connectivity(
            allowed=between(self.others, self.web, "tcp/8000", "udp/53"),
            denied=between([*self.others, *self.web], self.web, "tcp/80"),
        )

    async def create_and_delete_rule(self) -> None:
        """Create and delete a rule, and assert that each write is enforced when it returns."""
        await self.testbed.rule("some", "3", "-d in -l tcp -P 9000 -p 100 -j allow")
        await assert_connectivity(allowed=between(self.others, self.web, "tcp/9000"))
        await self.testbed.drop_rule("some", "3")
        await assert_connectivity(denied=between(self.others, self.web, "tcp/9000"))

    async def replace_pods(self, host: Host) -> None:
        """Delete the pods of a host and create new ones."""
        for pods in (self.web, self.others):
            for pod in [pod for pod in pods if pod.host is host]:
                await pod.remove()
                pods.remove(pod)
        await self.add_pods(host)

    async def add_pods(self, host: Host) -> None:
        """Create more pods on a host."""
        self.web.append(await self.testbed.pod(host, "web"))
        self.others.append(await self.testbed.pod(host))


@pytest_asyncio.fixture(loop_scope="module")
async def tenant(lab: NetLab, make_tenant: Callable[[], TenantFixture]) -> AsyncIterator[PolicedTenant]:
    tenant = PolicedTenant(make_tenant())
    await tenant.build()
    await tenant.assert_policy_enforced()
    try:
        yield tenant
        for pod in (*tenant.web, *tenant.others):
            await pod.remove()
        await inventory.wait_consistent(lab)
    finally:
        lab.print_logs()


@asynccontextmanager
async def more_masters(lab: NetLab) -> AsyncIterator[Masters]:
    async with AsyncExitStack() as stack:
        yield Masters(lab, stack)


@TOWNS_ALL_IN_SOAK
async def test_t2_the_leader_is_killed_and_another_takes_over(lab: NetLab, tenant: PolicedTenant) -> None:
    async with more_masters(lab) as masters:
        second = await masters.add()
        assert await eventually(lambda: masters.leader(second), bool) is lab.master
        lab.master.kill()
        await tenant.assert_policy_enforced()
        await tenant.add_pods(lab.hosts["one"])
        await eventually(lambda: masters.leader(second), lambda leader: leader is second)
        tenant.testbed.url = second.url
        await tenant.create_and_delete_rule()
        await tenant.assert_policy_enforced()
        await lab.master.start()
        tenant.testbed.url = lab.master.url
        await tenant.create_and_delete_rule()


@TOWNS_ALL_IN_SOAK
async def test_t3_all_masters_move_to_other_ports(lab: NetLab, tenant: PolicedTenant) -> None:
    """Agents depend on the store, not on the address of a master."""
    async with more_masters(lab) as masters:
        lab.master.kill()
        for _ in range(2):
            tenant.testbed.url = (await masters.add()).url
        await tenant.create_and_delete_rule()
        await tenant.replace_pods(lab.hosts["two"])
        await tenant.assert_policy_enforced()
    await lab.master.start()


@TOWNS_ALL_IN_SOAK
async def test_t4_a_killed_agent_is_shown_unreachable_and_changes_no_route(lab: NetLab, tenant: PolicedTenant) -> None:
    """Contiv removed the peer's tunnel. Here packets pass both ways, with the installed policy."""
    two = lab.hosts["two"]

    async def state() -> str:
        rows = (await lab.rest.get("nodes")).accepted()
        return str(next(row["status"]["state"] for row in rows if row["name"] == "two"))

    two.kill()
    await eventually(state, lambda shown: shown == "Unreachable")
    await tenant.assert_policy_enforced()
    await tenant.add_pods(lab.hosts["one"])
    await two.start()
    await eventually(state, lambda shown: shown == "Ready")
    await tenant.assert_policy_enforced()
    await tenant.create_and_delete_rule()


@TOWNS_ON_ALL
async def test_t5_a_node_is_rebooted(lab: NetLab, tenant: PolicedTenant) -> None:
    """Its pods are lost; new pods are policed on both hosts from their first packet on."""
    one = lab.hosts["one"]
    set_underlay_down(one)
    await lab.reboot(one)
    for pods in (tenant.web, tenant.others):
        pods[:] = [pod for pod in pods if pod.host is not one]
    await tenant.assert_policy_enforced()
    await tenant.add_pods(one)
    await tenant.assert_policy_enforced()
    await tenant.create_and_delete_rule()


def set_underlay_down(host: Host) -> None:
    """A powered-off machine sends nothing; in the lab its netns lives on while its agent has connections."""
    subprocess.run(["ip", "link", "set", host.underlay_veth, "down"], check=True, timeout=DEADLINE)


@TOWNS_ALL_IN_SOAK
async def test_t6_the_store_is_restarted(lab: NetLab, tenant: PolicedTenant) -> None:
    assert lab.etcd is not None
    lab.etcd.members[0].kill()
    await tenant.assert_policy_enforced()
    await tenant.add_pods(lab.hosts["one"])
    await assert_connectivity(denied=between(tenant.others, tenant.web, "tcp/80"))
    await lab.etcd.restart()
    await lab.rest.ready()
    await tenant.create_and_delete_rule()
    await tenant.assert_policy_enforced()


@TOWNS_ALL_IN_SOAK
@pytest.mark.parametrize("times", [4, pytest.param(25, marks=[pytest.mark.soak, pytest.mark.timeout(600)])])
async def test_t7_the_uplink_of_a_node_flaps(lab: NetLab, tenant: PolicedTenant, times: int) -> None:
    """Repeatedly disconnected from the store and from the other host: denied packets never pass."""
    two = lab.hosts["two"]
    others, web = [[pod for pod in pods if pod.host is two] for pods in (tenant.others, tenant.web)]
    for _ in range(times):
        await lab.partition(two)
        await assert_connectivity(
            allowed=between(others, web, "tcp/8000"), denied=between(tenant.others, tenant.web, "tcp/80")
        )
        lab.heal(two)
        # The flap period is part of the scenario: some timeouts expire within it, others do not.
        await asyncio.sleep(0.5)
    await tenant.assert_policy_enforced()
    await tenant.create_and_delete_rule()


@TOWNS_ALL_IN_SOAK
@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_t8_restarts_at_random_with_policy_checks(lab: NetLab, tenant: PolicedTenant, rounds: int) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201  printed on failure
    dice = random.Random(seed)

    async def restart_agent(host: Host) -> None:
        host.kill()
        await tenant.assert_policy_enforced()
        await host.start()

    async def restart_master(_: Host) -> None:
        await lab.master.start()

    async def restart_store(_: Host) -> None:
        assert lab.etcd is not None
        await lab.etcd.restart()
        await lab.rest.ready()

    actions: list[Callable[[Host], Awaitable[None]]] = [
        restart_agent,
        restart_master,
        restart_store,
        tenant.replace_pods,
    ]
    for action in [*actions, *dice.choices(actions, k=rounds)][:rounds]:
        await action(dice.choice([*lab.hosts.values()]))
        await tenant.assert_policy_enforced()
    await tenant.create_and_delete_rule()
