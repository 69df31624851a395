"""Outages of netmaster, store, agent, underlay link and power (ADR 2)."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from tests.support import inventory
from tests.support.modes import ALL_IN_SOAK

from weft.cni.errors import CniError, Code
from weft.lab import traffic
from weft.lab.hosts import Pod
from weft.lab.netlab import NetLab, open_lab
from weft.lab.waiting import eventually


@ALL_IN_SOAK
async def test_add_and_del_work_while_the_store_is_down(lab: NetLab) -> None:
    """The store is in netmaster. ADD works from owned blocks; a shared pool returns "try again later"."""
    await lab.network("small", subnet="10.1.1.0/24")
    host = await lab.host("one")
    old, first = await host.pod("old"), await host.pod("first")
    lab.master.kill()
    second = await host.pod("second")
    assert await first.eventually_reaches(second)
    with pytest.raises(CniError) as later:
        await host.pod("shared", network="small")
    assert later.value.code == Code.TRY_LATER
    await old.remove()
    third = await host.pod("third")
    assert third.address() != old.address(), "a released address is free only after the store has recorded it"
    await lab.master.start()
    await inventory.wait_consistent(lab)
    names = {key.rpartition("/")[2] for key in await lab.rest.state() if key.startswith("endpoints/")}
    assert names == {"first", "second", "third"}
    shared, other = await host.pod("shared", network="small"), await host.pod("other", network="small")
    assert await shared.eventually_reaches(other)


@ALL_IN_SOAK
async def test_agent_restart_while_netmaster_and_store_are_down(lab: NetLab) -> None:
    """DEL and CHECK need only the attachment log and the kernel."""
    host = await lab.host("one")
    a, b = await host.pod("a"), await host.pod("b")
    lab.master.kill()
    host.kill()
    host.launch()
    await eventually(lambda: _check_succeeds(a), bool)
    await b.remove()
    await lab.master.start()
    await host.ready()
    await a.check()
    await inventory.wait_consistent(lab)


async def _check_succeeds(pod: Pod) -> bool:
    with suppress(CniError):
        await pod.check()
        return True
    return False


async def test_etcd_is_killed_and_restarted(isolated: None) -> None:
    async with open_lab(store="etcd") as lab:
        assert lab.etcd is not None
        one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
        a, b = await one.pod("a"), await two.pod("b")
        lab.etcd.members[0].kill()
        c = await one.pod("c")
        assert await c.eventually_reaches(a)
        await b.remove()
        await lab.etcd.restart()
        await inventory.wait_consistent(lab)
        assert await c.eventually_reaches(await two.pod("d"))


@ALL_IN_SOAK
async def test_an_agent_restart_loses_no_packet(lab: NetLab) -> None:
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b, c = await one.pod("a"), await one.pod("b"), await two.pod("c")
    assert await a.eventually_reaches(c)
    stop = asyncio.Event()
    streams = [asyncio.ensure_future(traffic.stream(a.place(), pod.place(), port=5000, stop=stop)) for pod in (b, c)]
    for host in (one, two):
        host.kill()
        await host.start()
    stop.set()
    for streamed in await asyncio.gather(*streams):
        assert streamed.sent > 50
        assert streamed.arrived == streamed.sent


@ALL_IN_SOAK
async def test_a_partitioned_host_recovers(lab: NetLab) -> None:
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, b = await one.pod("a"), await two.pod("b")
    assert await a.eventually_reaches(b)
    await lab.partition(two)
    assert await a.never_reaches(b)
    c = await two.pod("c")
    assert await c.eventually_reaches(b), "the host allocates from its own blocks"
    lab.heal(two)
    assert await a.eventually_reaches(b)
    assert await a.eventually_reaches(c)
    await inventory.wait_consistent(lab)


@ALL_IN_SOAK
async def test_a_reboot_leaks_nothing(lab: NetLab) -> None:
    """W31: kernel state is lost, the attachment log is kept; addresses are released, and late DELs succeed."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    before = [await one.pod(name) for name in "abc"]
    other = await two.pod("other")
    await lab.reboot(one)
    await inventory.wait_consistent(lab)
    assert {held.host for held in inventory.stored(await lab.rest.state())} == {"two"}
    for pod in before:
        output = await one.call("DEL", containerid=pod.name, ifname="eth0", netns=str(pod.netns))
        assert output.exit_code == 0
    again = await one.pod("a")
    assert await again.eventually_reaches(other)
    await inventory.wait_consistent(lab)


@ALL_IN_SOAK
async def test_a_new_node_is_reachable_and_a_killed_agent_changes_no_route(lab: NetLab) -> None:
    one = await lab.host("one")
    a = await one.pod("a")
    two = await lab.host("two")
    b = await two.pod("b")
    assert await a.eventually_reaches(b)
    two.kill()
    await eventually(lab.rest.state, lambda entries: bool(entries["nodes/two"]["o"].get("unreachableSince")))
    assert await a.eventually_reaches(b), "liveness is status, not routing"
    await two.start()
    await eventually(lab.rest.state, lambda entries: not entries["nodes/two"]["o"].get("unreachableSince"))
