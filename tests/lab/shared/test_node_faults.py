"""Faults (ADR 2, ADR 7): ADD and DEL go on as far as they may, nothing forbidden passes, and all converges.

Forbidden packets are sent throughout. The store is an etcd, so that masters and store can be away one by one.
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
from tests.support.forbidden_traffic import Fire
from tests.support.modes import TOWNS_ALL_IN_SOAK
from tests.support.tenant_fixture import TenantFixture

from weft.cni.errors import CniError, Code
from weft.lab.hosts import Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import eventually, until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), TOWNS_ALL_IN_SOAK]

SHUT = 6000
OUTAGE = [10.0, pytest.param(60.0, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
STORE = "etcd"
FLUSHES = 5


class Scene:
    """A group that is open on one TCP port, others that may speak to it there, and a network of claimed addresses."""

    def __init__(self, town: TenantFixture) -> None:
        self.town = town
        self.web: list[Pod] = []
        self.others: list[Pod] = []

    async def settle(self) -> None:
        await self.town.build()
        small = "--subnet 10.5.1.0/24 --subnetv6 2001:db8:5::/64"
        await self.town.netctl(f"network create small -t {self.town.tenant} --encap {self.town.lab.netmode} {small}")
        await self.town.policy("some", "-d in -p 1 -j deny", "-d in -l tcp -P 8000 -p 100 -j allow")
        await self.town.group("web", "some")
        self.web, self.others = await self.town.pods("web"), await self.town.pods()
        await self.holds()

    def fire(self) -> Fire:
        """What must not arrive, from now on."""
        return Fire(self.others, self.web, port=SHUT)

    async def holds(self, *more: Pod) -> None:
        """The rules do, for these and for further pods of the group."""
        web = [*self.web, *more]
        await assert_connectivity(
            passing=between(self.others, web, "tcp/8000"), refused=between(self.others, web, "tcp/80", "udp/53", "icmp")
        )

    async def change(self) -> None:
        """A rule comes into force everywhere, and goes."""
        await self.town.rule("some", "3", "-d in -l tcp -P 9000 -p 100 -j allow")
        await assert_connectivity(passing=between(self.others, self.web, "tcp/9000"))
        await self.town.drop_rule("some", "3")
        await assert_connectivity(refused=between(self.others, self.web, "tcp/9000"))


@pytest_asyncio.fixture(loop_scope="module")
async def scene(lab: NetLab, found: Callable[[], TenantFixture]) -> AsyncIterator[Scene]:
    scene = Scene(found())
    await scene.settle()
    try:
        yield scene
        await inventory.settled(lab)
    finally:
        lab.tell_logs()


@pytest.mark.parametrize("seconds", OUTAGE)
async def test_the_store_is_away(lab: NetLab, scene: Scene, seconds: float) -> None:
    """Owned blocks go on, claims say later, and who leaves leaves. Newcomers are policed by their own node."""
    assert lab.etcd is not None
    one = lab.hosts["one"]
    ends = asyncio.get_running_loop().time() + seconds
    with scene.fire() as fire:
        lab.etcd.members[0].kill()
        new = await scene.town.pod(one, "web")
        near = [pod for pod in scene.others if pod.host is one]
        await assert_connectivity(
            passing=between(near, [new], "tcp/8000"), refused=between(scene.others, [new], "tcp/80")
        )
        with pytest.raises(CniError) as later:
            await scene.town.pod(one, network="small")
        assert later.value.code == Code.TRY_LATER
        leaving = await scene.town.pod(one)
        await leaving.remove()
        while asyncio.get_running_loop().time() < ends:
            await scene.holds()
        await lab.etcd.restart()
        await lab.rest.ready()
        await scene.holds(new)
        await scene.change()
        assert fire.arrived == 0
    await scene.town.pod(one, network="small")


async def test_all_masters_are_away(lab: NetLab, scene: Scene) -> None:
    """They are not on the way of an ADD (ADR 2): even claimed addresses are given, and both hosts know of it."""
    with scene.fire() as fire:
        lab.master.kill()
        new = await scene.town.pods("web")
        claimed = await scene.town.pods(network="small")
        if lab.fwdmode == "routing":
            scene.others += claimed
        else:  # networks do not meet (N3)
            await assert_connectivity(passing=between(claimed[:1], claimed[1:], "tcp/80"))
        await scene.holds(*new)
        await new[0].remove()
        await lab.master.start()
        await scene.holds(new[1])
        await scene.change()
        assert fire.arrived == 0


async def test_a_host_is_cut_off_from_the_store_alone(lab: NetLab, scene: Scene) -> None:
    """Packets go on between the hosts. What changed meanwhile is in force there as soon as it is heard of."""
    two = lab.hosts["two"]
    with scene.fire() as fire:
        await two.door.shut()
        await scene.town.rule("some", "3", "-d in -l tcp -P 9000 -p 100 -j allow", wait="")
        new = await scene.town.pod(two, "web")
        near = [pod for pod in scene.others if pod.host is two]
        await assert_connectivity(passing=between(near, [new], "tcp/8000"), refused=between(near, [new], "tcp/9000"))
        await scene.holds()
        two.door.open()
        await assert_connectivity(passing=between(scene.others, [*scene.web, new], "tcp/8000", "tcp/9000"))
        assert fire.arrived == 0


async def test_an_agent_restarts_while_the_store_is_away(lab: NetLab, scene: Scene) -> None:
    """It knows nothing of the cluster yet, and leaves what was in force as it is; DEL and CHECK are served."""
    two = lab.hosts["two"]
    leaving = await scene.town.pod(two)
    with scene.fire() as fire:
        await two.door.shut()
        two.kill()
        await fire.burns()
        two.launch()
        await eventually(lambda: is_whole(leaving), bool)
        await leaving.remove()
        await scene.holds()
        assert fire.arrived == 0
        two.door.open()
        await two.ready()
        await scene.holds()
        await scene.change()
        assert fire.arrived == 0


async def is_whole(pod: Pod) -> bool:
    """What CHECK says; no agent says nothing."""
    with suppress(CniError):
        await pod.check()
        return True
    return False


async def test_a_foreign_hand_flushes_all_rules_of_a_tenant(lab: NetLab, scene: Scene) -> None:
    """It is noticed and mended within a moment. Until then nothing passes: there is nobody who could say what may.

    Only packets that are between two hooks at that very moment, so that one of them still had its rules, can slip.
    """
    spaces = [host.tenants.path / scene.town.tenant for host in lab.hosts.values()]
    with scene.fire() as fire:
        for _ in range(FLUSHES):
            with ExitStack() as agents:
                for host in lab.hosts.values():
                    agents.enter_context(host.agent.held_still())
                for space in spaces:
                    flush(space)
                await fire.burns()
                slipped = fire.arrived
                await fire.burns()
                assert fire.arrived == slipped  # closed while nobody looks
            await until(lambda: all(map(has_rules, spaces)))
            await fire.burns()
            assert fire.arrived == slipped  # and while it is mended
        await scene.holds()
        assert slipped <= FLUSHES * len(spaces)


async def test_a_foreign_hand_flushes_all_rules_of_the_hosts(lab: NetLab, scene: Scene) -> None:
    """Tenants' rules are in namespaces of their own: what is flushed on a host opens nothing."""
    with scene.fire() as fire:
        for host in lab.hosts.values():
            flush(host.machine)
        await scene.holds()
        await fire.burns()
        assert fire.arrived == 0


async def test_docker_drops_what_hosts_forward(lab: NetLab, scene: Scene) -> None:
    """Its `FORWARD DROP` on the host stands in nobody's way: pods meet in namespaces of their own."""
    for host in lab.hosts.values():
        inventory.run(host.machine, "nft add table ip filter")
        inventory.run(
            host.machine, "nft add chain ip filter FORWARD { type filter hook forward priority 0 ; policy drop ; }"
        )
    try:
        with scene.fire() as fire:
            await scene.holds()
            await scene.holds(*await scene.town.pods("web"))
            assert fire.arrived == 0
    finally:
        for host in lab.hosts.values():
            inventory.run(host.machine, "nft delete table ip filter")


def flush(namespace: Path) -> None:
    inventory.run(namespace, "nft flush ruleset")


def has_rules(namespace: Path) -> bool:
    """Whether the tenant's table is there with somebody who may speak."""
    listed = inventory.ask(namespace, "nft", "-j", "list", "ruleset")["nftables"]
    return any(each["set"].get("elem") for each in listed if each.get("set", {}).get("name", "").startswith("ports"))
