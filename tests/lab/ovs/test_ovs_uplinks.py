"""Changing uplinks (T1): one, a bond of two, the other one, under traffic."""

from __future__ import annotations

import asyncio

import pytest
from tests.support import inventory
from tests.support.sequence_stream import Stream
from tests.support.switch_inventory import uplinks

from weft.lab.hosts import Host
from weft.lab.netlab import UPLINKS, NetLab
from weft.lab.waiting import until

ONE, OTHER = UPLINKS
RATE = 200


@pytest.fixture
def netmode() -> str:
    return "vlan"


@pytest.fixture(autouse=True)
def learning_wire(lab: NetLab) -> None:
    """The physical switch learns MACs, so a new location must be announced."""
    lab.enable_trunk_learning()


async def choose(host: Host, *names: str) -> None:
    """Restart the agent with other uplinks."""
    host.kill()
    host.flags = (*host.flags, "--vlan-uplinks", ",".join(names))
    await host.start()
    assert host.switch is not None
    assert uplinks(host.switch) == set(names)


async def keeps_arriving(stream: Stream) -> None:
    """Wait until another hundred packets arrive."""
    before = stream.arrived
    await until(lambda: stream.arrived > before + 100)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fwdmode", [pytest.param(mode, marks=pytest.mark.soak) for mode in ("routing", "bridge")])
async def test_uplinks_become_a_bond_and_another_under_traffic(lab: NetLab) -> None:
    """T1: one-way traffic keeps arriving over the remaining uplink."""
    await lab.network("net", subnet="10.1.0.0/16", ipv6Subnet="2001:db8:1::/64")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b = await one.pod("a", network="net"), await two.pod("b", network="net")
    assert await a.eventually_reaches(b)
    with Stream(a.place(), b.place(), port=5000, rate=RATE) as stream:
        await keeps_arriving(stream)
        for names in ((ONE, OTHER), (OTHER,), (ONE, OTHER), (ONE,), (OTHER,)):
            for host in (one, two):
                await choose(host, *names)
                await keeps_arriving(stream)
        for lost in (ONE, OTHER):
            await choose(one, ONE, OTHER)
            inventory.run(one.netns, f"ip link set {lost} down")
            await keeps_arriving(stream)
            inventory.run(one.netns, f"ip link set {lost} up")
            await keeps_arriving(stream)
    for family in (4, 6):
        assert await b.eventually_reaches(a, family=family)


async def test_an_uplink_becomes_a_bond_and_one_again(lab: NetLab) -> None:
    """T1, once: pods stay, and keep reaching each other."""
    await lab.network("net", subnet="10.1.0.0/16")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b = await one.pod("a", network="net"), await two.pod("b", network="net")
    for names in ((ONE, OTHER), (OTHER,)):
        await choose(one, *names)
        assert await a.eventually_reaches(b)


async def test_without_uplinks_nothing_of_them_is_left(lab: NetLab) -> None:
    """The network is local to each node then, which is reported; foreign bridges stay."""
    await lab.network("net", subnet="10.1.0.0/16")
    host = await lab.host("one")
    a, b = await host.pod("a", network="net"), await host.pod("b", network="net")
    switch = host.switch
    assert switch is not None
    switch.configure("add-br", "foreign", "--", "set", "bridge", "foreign", "datapath_type=netdev")
    host.kill()
    host.flags = tuple(flag for flag in host.flags if flag not in {"--netmode", "vlan", "--vlan-uplinks", ONE})
    await host.start()
    assert set(switch.configure("list-br").split()) == {"contivVxlanBridge", "foreign"}
    assert "weft-vlan" not in switch.configure("list-ports", "contivVxlanBridge").split()
    assert await a.eventually_reaches(b)
