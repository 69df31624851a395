"""Agents and runtimes that are killed at chosen points of an ADD or a DEL (C-047, C-065).

The point is chosen by holding the store still: an agent that must ask it waits right there, for as long as we like.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.support import inventory
from tests.support.modes import ALL_IN_SOAK

from weft.cni.errors import CniError, Code
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually, until
from weft.runtime.backoff import Backoff

# A network whose addresses come from the node's own blocks, and one where the store is asked for each.
BLOCKS, CLAIMS = "blocks", "claims"
pytestmark = ALL_IN_SOAK
both = pytest.mark.parametrize("network", [BLOCKS, CLAIMS])


@pytest.fixture
async def host(lab: NetLab) -> Host:
    """A host with a pod in each network, so that it has its blocks."""
    await lab.network(BLOCKS, subnet="10.1.0.0/16", ipv6Subnet="2001:db8:1::/64")
    await lab.network(CLAIMS, subnet="10.2.1.0/24", ipv6Subnet="2001:db8:2::/64")
    host = await lab.host("one")
    for network in (BLOCKS, CLAIMS):
        await host.pod(f"keeper-{network}", network=network)
    return host


@contextmanager
def store_held_still(lab: NetLab) -> Iterator[None]:
    lab.master.stop()
    try:
        yield
    finally:
        lab.master.go_on()


async def begin_add(host: Host, network: str) -> asyncio.Task[Pod]:
    """An ADD of pod `a`, as far as it comes without the store: from its own blocks it may even have been answered."""
    adding = asyncio.create_task(host.pod("a", network=network))
    if network == BLOCKS:
        netns = host.make_netns("a")
        await until(lambda: "eth0" in inventory.devices(netns))
    else:
        await asyncio.sleep(0.3)  # by now it asks the store, which cannot be seen; an earlier point is as good a test
    return adding


async def begin_del(pod: Pod) -> asyncio.Task[None]:
    """A DEL that is done with the kernel, and has the store to tell."""
    deleting = asyncio.create_task(pod.detach())
    await until(lambda: "eth0" not in inventory.devices(pod.netns))
    return deleting


async def stored_pods(lab: NetLab) -> set[str]:
    return {key.rpartition("/")[2] for key in await lab.rest.state() if key.startswith("endpoints/")}


async def only_keepers_are_left(lab: NetLab) -> None:
    """In kernel, rules, ledger and store."""
    await eventually(lambda: stored_pods(lab), lambda names: names == {f"keeper-{BLOCKS}", f"keeper-{CLAIMS}"})
    await inventory.settled(lab)


async def attached_in_the_end(host: Host, network: str) -> Pod:
    """The pod, tried again as runtimes do for as long as the agent says so: it may not have found the store again."""
    backoff = Backoff(first=0.05, cap=0.5, within=DEADLINE)
    while True:
        try:
            return await host.pod("a", network=network)
        except CniError as error:
            if error.code != Code.TRY_LATER:
                raise
            await backoff.pause()


async def works_again(host: Host, network: str) -> None:
    """A pod of the same name comes, is whole, and goes."""
    pod = await attached_in_the_end(host, network)
    await pod.check()
    for family in (4, 6):
        neighbour = await host.pod(f"neighbour-{family}", network=network)
        assert await pod.reaches(neighbour, family=family)
        await neighbour.remove()
    await pod.remove()


@both
async def test_an_agent_killed_before_the_store_hears_of_an_add(lab: NetLab, host: Host, network: str) -> None:
    """C-065: what the store was asked for may come true after the kill. What was not answered is rolled back."""
    with store_held_still(lab):
        adding = await begin_add(host, network)
        host.kill()
        await asyncio.wait([adding])
    await host.start()
    await inventory.settled(lab)
    is_there = "a" in await stored_pods(lab)
    assert is_there or adding.exception() is not None
    if is_there:
        # It was answered; or the agent was killed between its last note and the answer, and a runtime that heard none
        # takes back what it asked for.
        assert network == BLOCKS
        if adding.exception() is None:
            await adding.result().check()
        await host.cni.delete(host.network, host.attachment("a", network=network))
    await only_keepers_are_left(lab)
    await works_again(host, network)
    await only_keepers_are_left(lab)


@both
async def test_an_agent_killed_before_the_store_hears_of_a_del(lab: NetLab, host: Host, network: str) -> None:
    pod = await host.pod("a", network=network)
    with store_held_still(lab):
        deleting = await begin_del(pod)
        host.kill()
        await asyncio.wait([deleting])
    await host.start()
    await only_keepers_are_left(lab)
    await pod.remove()
    await works_again(host, network)


async def test_a_runtime_killed_while_the_store_is_asked(lab: NetLab, host: Host) -> None:
    """The agent hears that nobody waits any more, and undoes the ADD by itself: no DEL need ever come."""
    with store_held_still(lab):
        adding = await begin_add(host, CLAIMS)
        adding.cancel()
        await asyncio.wait([adding])
    await only_keepers_are_left(lab)
    assert "eth0" not in inventory.devices(host.make_netns("a"))
    await works_again(host, CLAIMS)
    await only_keepers_are_left(lab)


@both
async def test_a_del_right_after_the_runtime_was_killed(lab: NetLab, host: Host, network: str) -> None:
    """It waits for the end of what it is to free, succeeds, and the next ADD of that very container works."""
    with store_held_still(lab):
        adding = await begin_add(host, network)
        adding.cancel()
        await asyncio.wait([adding])
        deleting = asyncio.create_task(host.cni.delete(host.network, host.attachment("a", network=network)))
        await asyncio.sleep(0)
    await deleting
    await works_again(host, network)
    await only_keepers_are_left(lab)


@both
async def test_a_runtime_killed_in_the_middle_of_del(lab: NetLab, host: Host, network: str) -> None:
    """What it frees is freed all the same."""
    pod = await host.pod("a", network=network)
    with store_held_still(lab):
        deleting = await begin_del(pod)
        deleting.cancel()
        await asyncio.wait([deleting])
    await only_keepers_are_left(lab)
    await works_again(host, network)


@both
async def test_a_call_that_was_given_up_before_the_agent_heard_it(
    lab: NetLab, host: Host, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that stood still finds calls in its queue whose callers have left: nothing is attached for them."""
    with host.agent.held_still(), monkeypatch.context() as impatient:
        impatient.setenv("WEFT_CNI_DEADLINE_MS", "500")
        with pytest.raises(CniError) as told:
            await host.pod("a", network=network)
    assert told.value.code == Code.TRY_LATER
    await host.ready()
    await only_keepers_are_left(lab)
    await works_again(host, network)


async def test_the_agent_says_why_before_the_shim_gives_up(
    lab: NetLab, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-050, C-068: the agent's reason is heard, and what came of the ADD later is undone."""
    monkeypatch.setenv("WEFT_CNI_DEADLINE_MS", "8000")
    with store_held_still(lab), pytest.raises(CniError) as told:
        await host.pod("a", network=CLAIMS)
    assert told.value.code == Code.TRY_LATER
    assert told.value.message != "the weft agent did not answer in time"
    monkeypatch.undo()
    await only_keepers_are_left(lab)
    await works_again(host, CLAIMS)
