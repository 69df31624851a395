"""Faults (ADR 2, ADR 7): ADD and DEL keep working where they can, denied traffic stays denied, and state converges.

Denied packets are sent all the time. The store is an etcd, so that masters and store can fail separately.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support import inventory
from tests.support.connectivity import assert_connectivity, between
from tests.support.forbidden_traffic import ForbiddenTraffic
from tests.support.modes import TOWNS_ALL_IN_SOAK
from tests.support.tenant_fixture import TenantFixture

from weft.cni.errors import CniError, Code
from weft.lab.hosts import Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import eventually, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), TOWNS_ALL_IN_SOAK]

CLOSED = 6000
OUTAGE = [10.0, pytest.param(60.0, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
STORE = "etcd"
FLUSHES = 5


class Scene:
    """A group with one allowed TCP port, other pods that use it, and a network with claimed addresses."""

    def __init__(self, testbed: TenantFixture) -> None:
        self.testbed = testbed
        self.web: list[Pod] = []
        self.others: list[Pod] = []

    async def build(self) -> None:
        await self.testbed.build()
        small = "--subnet 10.5.1.0/24 --subnetv6 2001:db8:5::/64"
        await self.testbed.netctl(
            f"network create small -t {self.testbed.tenant} --encap {self.testbed.lab.netmode} {small}"
        )
        await self.testbed.policy("some", "-d in -p 1 -j deny", "-d in -l tcp -P 8000 -p 100 -j allow")
        await self.testbed.group("web", "some")
        self.web, self.others = await self.testbed.pods("web"), await self.testbed.pods()
        await self.assert_policy_enforced()

    def traffic(self) -> ForbiddenTraffic:
        """Send denied packets from now on."""
        return ForbiddenTraffic(self.others, self.web, port=CLOSED)

    async def assert_policy_enforced(self, *more: Pod) -> None:
        """Assert the policy for the group's pods and for further ones."""
        web = [*self.web, *more]
        await assert_connectivity(
            allowed=between(self.others, web, "tcp/8000"), denied=between(self.others, web, "tcp/80", "udp/53", "icmp")
        )

    async def create_and_delete_rule(self) -> None:
        """Create a rule, assert that it is enforced, and delete it."""
        await self.testbed.rule("some", "3", "-d in -l tcp -P 9000 -p 100 -j allow")
        await assert_connectivity(allowed=between(self.others, self.web, "tcp/9000"))
        await self.testbed.drop_rule("some", "3")
        await assert_connectivity(denied=between(self.others, self.web, "tcp/9000"))


@pytest_asyncio.fixture(loop_scope="module")
async def scene(lab: NetLab, make_tenant: Callable[[], TenantFixture]) -> AsyncIterator[Scene]:
    scene = Scene(make_tenant())
    await scene.build()
    try:
        yield scene
        await inventory.wait_consistent(lab)
    finally:
        lab.print_logs()


@pytest.mark.parametrize("seconds", OUTAGE)
async def test_the_store_is_down(lab: NetLab, scene: Scene, seconds: float) -> None:
    """ADD works from owned blocks and fails for claims; DEL works. New pods are policed by their own node."""
    assert lab.etcd is not None
    one = lab.hosts["one"]
    ends = asyncio.get_running_loop().time() + seconds
    with scene.traffic() as traffic:
        lab.etcd.members[0].kill()
        new = await scene.testbed.pod(one, "web")
        near = [pod for pod in scene.others if pod.host is one]
        await assert_connectivity(
            allowed=between(near, [new], "tcp/8000"), denied=between(scene.others, [new], "tcp/80")
        )
        with pytest.raises(CniError) as later:
            await scene.testbed.pod(one, network="small")
        assert later.value.code == Code.TRY_LATER
        leaving = await scene.testbed.pod(one)
        await leaving.remove()
        while asyncio.get_running_loop().time() < ends:
            await scene.assert_policy_enforced()
        await lab.etcd.restart()
        await lab.rest.ready()
        await scene.assert_policy_enforced(new)
        await scene.create_and_delete_rule()
        assert traffic.arrived == 0
    await scene.testbed.pod(one, network="small")


async def test_all_masters_are_down(lab: NetLab, scene: Scene) -> None:
    """ADD does not need them (ADR 2): even claimed addresses are allocated, and both hosts learn of it."""
    with scene.traffic() as traffic:
        lab.master.kill()
        new = await scene.testbed.pods("web")
        claimed = await scene.testbed.pods(network="small")
        if lab.fwdmode == "routing":
            scene.others += claimed
        else:  # networks are isolated (N3)
            await assert_connectivity(allowed=between(claimed[:1], claimed[1:], "tcp/80"))
        await scene.assert_policy_enforced(*new)
        await new[0].remove()
        await lab.master.start()
        await scene.assert_policy_enforced(new[1])
        await scene.create_and_delete_rule()
        assert traffic.arrived == 0


async def test_a_host_is_disconnected_from_the_store_only(lab: NetLab, scene: Scene) -> None:
    """Packets pass between the hosts. Policy changes are applied after the reconnect."""
    two = lab.hosts["two"]
    with scene.traffic() as traffic:
        await two.store_proxy.block()
        await scene.testbed.rule("some", "3", "-d in -l tcp -P 9000 -p 100 -j allow", wait="")
        new = await scene.testbed.pod(two, "web")
        near = [pod for pod in scene.others if pod.host is two]
        await assert_connectivity(allowed=between(near, [new], "tcp/8000"), denied=between(near, [new], "tcp/9000"))
        await scene.assert_policy_enforced()
        two.store_proxy.unblock()
        await assert_connectivity(allowed=between(scene.others, [*scene.web, new], "tcp/8000", "tcp/9000"))
        assert traffic.arrived == 0


async def test_an_agent_restarts_while_the_store_is_down(lab: NetLab, scene: Scene) -> None:
    """It has no cluster state yet and keeps the installed policy; DEL and CHECK work."""
    two = lab.hosts["two"]
    leaving = await scene.testbed.pod(two)
    with scene.traffic() as traffic:
        await two.store_proxy.block()
        two.kill()
        await traffic.wait_for_more_packets()
        two.launch()
        await eventually(lambda: check_succeeds(leaving), bool)
        await leaving.remove()
        await scene.assert_policy_enforced()
        assert traffic.arrived == 0
        two.store_proxy.unblock()
        await two.ready()
        await scene.assert_policy_enforced()
        await scene.create_and_delete_rule()
        assert traffic.arrived == 0


async def check_succeeds(pod: Pod) -> bool:
    """Whether CHECK succeeds; false without an agent."""
    with suppress(CniError):
        await pod.check()
        return True
    return False


async def test_another_process_flushes_the_ruleset_of_a_tenant(lab: NetLab, scene: Scene) -> None:
    """Drift is detected and repaired quickly. Until then all traffic is dropped: there is no policy to evaluate.

    Only a packet between two hooks at the moment of the flush can slip through.
    """
    namespaces = [host.tenants.path / scene.testbed.tenant for host in lab.hosts.values()]
    with scene.traffic() as traffic:
        for _ in range(FLUSHES):
            with ExitStack() as agents:
                for host in lab.hosts.values():
                    agents.enter_context(host.agent.paused())
                for namespace in namespaces:
                    flush(namespace)
                await traffic.wait_for_more_packets()
                slipped = traffic.arrived
                await traffic.wait_for_more_packets()
                assert traffic.arrived == slipped  # closed before the repair
            await until(lambda: all(map(has_rules, namespaces)))
            await traffic.wait_for_more_packets()
            assert traffic.arrived == slipped  # and during the repair
        await scene.assert_policy_enforced()
        assert slipped <= FLUSHES * len(namespaces)


async def test_another_process_flushes_the_ruleset_of_the_hosts(lab: NetLab, scene: Scene) -> None:
    """Tenant rules are in the tenant netns: a flush on the host opens nothing."""
    with scene.traffic() as traffic:
        for host in lab.hosts.values():
            flush(host.netns)
        await scene.assert_policy_enforced()
        await traffic.wait_for_more_packets()
        assert traffic.arrived == 0


async def test_a_forward_drop_policy_of_docker_does_not_affect_pods(lab: NetLab, scene: Scene) -> None:
    """Its `FORWARD DROP` on the host affects no pod: pods forward in tenant network namespaces."""
    for host in lab.hosts.values():
        inventory.run(host.netns, "nft add table ip filter")
        inventory.run(
            host.netns, "nft add chain ip filter FORWARD { type filter hook forward priority 0 ; policy drop ; }"
        )
    try:
        with scene.traffic() as traffic:
            await scene.assert_policy_enforced()
            await scene.assert_policy_enforced(*await scene.testbed.pods("web"))
            assert traffic.arrived == 0
    finally:
        for host in lab.hosts.values():
            inventory.run(host.netns, "nft delete table ip filter")


def flush(namespace: Path) -> None:
    inventory.run(namespace, "nft flush ruleset")


def has_rules(namespace: Path) -> bool:
    """Whether the tenant's table exists with an anti-spoofing entry."""
    listed = inventory.run_json(namespace, "nft", "-j", "list", "ruleset")["nftables"]
    sets = [each["set"] for each in listed if "set" in each]
    return any(each.get("elem") for each in sets if each["name"].startswith(("l3_spoofguard", "hairpin_self")))
