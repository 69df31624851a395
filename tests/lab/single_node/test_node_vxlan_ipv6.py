"""H1 and M7 over an IPv6 underlay: crafted VXLAN packets, and VTEPs that share their low 32 bits."""

from __future__ import annotations

import asyncio
import subprocess
from functools import partial

import pytest
from tests.support import inventory
from tests.support.connectivity import FAMILIES, assert_connectivity, between
from tests.support.tenant_fixture import TenantFixture
from tests.support.vxlan import send
from tests.support.vxlan_injection import NOBODY, Scene, address_of

from weft.kernel.netns import Namespace
from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE

VTEPS = {name: f"2001:db8:ffff:{number}::1" for number, name in enumerate(("one", "two", "three"), start=1)}


class Ipv6Host(Host):
    """A host with an IPv6 VTEP, which it has before its agent starts."""

    async def start(self) -> None:
        inventory.run(self.netns, f"ip addr replace {VTEPS[self.name]}/48 dev eth0 nodad")
        await super().start()


@pytest.mark.soak
@pytest.mark.parametrize("lab", ["linux", "ovs"], indirect=True)
@pytest.mark.parametrize("fwdmode", ["routing", "bridge"])
async def test_H1_M7_ipv6_underlay(lab: NetLab) -> None:
    """Pods of all nodes reach each other, and no attacker reaches them."""
    command = ["ip", "addr", "add", "2001:db8:ffff::254/48", "dev", "underlay", "nodad"]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=DEADLINE)
    adding = (lab.add(Ipv6Host, name, "--vtep-ip", vtep) for name, vtep in VTEPS.items())
    hosts = [*await asyncio.gather(*adding)]
    testbed = TenantFixture(lab, "t1")
    await testbed.build()
    scene = Scene(testbed, hosts, VTEPS)
    await scene.build()
    pods = [scene.near, scene.friend_two, scene.friend_three]
    await assert_connectivity(allowed=between(pods, pods, "udp/53"))
    target = scene.vtep(scene.one)
    for place, address in (
        (None, target),
        (scene.one.netns, "::1"),
        (scene.one.netns, target),
        (scene.two.netns, target),
    ):
        with Namespace.current() if place is None else Namespace.open(place) as namespace:
            attack = partial(send, namespace, address)
            assert not await scene.arrived(attack, scene.sources(), scene.open, scene.closed), f"{place} {address}"
    as_node = scene.as_node(scene.two)
    foreign = [address_of(pod, family) for pod in (scene.near, scene.friend_three) for family in FAMILIES]
    assert not await scene.arrived(as_node, foreign, scene.open, scene.closed)
    assert not await scene.arrived(as_node, NOBODY.values(), scene.closed)
    own = [address_of(scene.friend_two, family) for family in FAMILIES]
    assert len(await scene.arrived(as_node, own, scene.open, scene.closed)) == 4
    await assert_connectivity(allowed=between(pods, pods, "udp/53"))
