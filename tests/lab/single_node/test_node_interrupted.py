"""Agents and runtimes that are killed at chosen points of an ADD or a DEL (C-047, C-065).

The point is chosen by stopping the store with SIGSTOP: an agent that needs the store waits until it continues.
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

# A network with addresses from the node's own blocks, and one where each allocation is a store write.
BLOCKS, CLAIMS = "blocks", "claims"
pytestmark = ALL_IN_SOAK
both = pytest.mark.parametrize("network", [BLOCKS, CLAIMS])


@pytest.fixture
async def host(lab: NetLab) -> Host:
    """A host with a pod in each network, so that it owns address blocks."""
    await lab.network(BLOCKS, subnet="10.1.0.0/16", ipv6Subnet="2001:db8:1::/64")
    await lab.network(CLAIMS, subnet="10.2.1.0/24", ipv6Subnet="2001:db8:2::/64")
    host = await lab.host("one")
    for network in (BLOCKS, CLAIMS):
        await host.pod(f"keeper-{network}", network=network)
    return host


@contextmanager
def paused_store(lab: NetLab) -> Iterator[None]:
    lab.master.pause()
    try:
        yield
    finally:
        lab.master.resume()


async def begin_add(host: Host, network: str) -> asyncio.Task[Pod]:
    """Start an ADD of pod `a` and let it run up to the store; with an own block it may even have returned."""
    adding = asyncio.create_task(host.pod("a", network=network))
    if network == BLOCKS:
        netns = host.make_netns("a")
        await until(lambda: "eth0" in inventory.devices(netns))
    else:
        # By now most ADDs wait for the store, which is not observable; any earlier point is as valid a test.
        await asyncio.sleep(0.3)
    return adding


async def begin_del(pod: Pod) -> asyncio.Task[None]:
    """Start a DEL that has removed the kernel objects and waits for the store."""
    deleting = asyncio.create_task(pod.detach())
    await until(lambda: "eth0" not in inventory.devices(pod.netns))
    return deleting


async def stored_pods(lab: NetLab) -> set[str]:
    return {key.rpartition("/")[2] for key in await lab.rest.state() if key.startswith("endpoints/")}


async def assert_only_keepers_left(lab: NetLab) -> None:
    """Wait until kernel, rules, attachment log and store contain the initial pods only."""
    await eventually(lambda: stored_pods(lab), lambda names: names == {f"keeper-{BLOCKS}", f"keeper-{CLAIMS}"})
    await inventory.wait_consistent(lab)


async def add_with_retries(host: Host, network: str) -> Pod:
    """ADD, retried on "try again later" as runtimes do: the agent may not be reconnected to the store."""
    backoff = Backoff(first=0.05, cap=0.5, within=DEADLINE)
    while True:
        try:
            return await host.pod("a", network=network)
        except CniError as error:
            if error.code != Code.TRY_LATER:
                raise
            await backoff.pause()


async def assert_add_check_del(host: Host, network: str) -> None:
    """ADD, CHECK and DEL of a pod with the same name succeed."""
    pod = await add_with_retries(host, network)
    await pod.check()
    for family in (4, 6):
        neighbour = await host.pod(f"neighbour-{family}", network=network)
        assert await pod.eventually_reaches(neighbour, family=family)
        await neighbour.remove()
    await pod.remove()


@both
async def test_agent_killed_before_an_add_is_stored(lab: NetLab, host: Host, network: str) -> None:
    """C-065: the store may commit the request after the kill. An ADD without a reply is rolled back."""
    with paused_store(lab):
        adding = await begin_add(host, network)
        host.kill()
        await asyncio.wait([adding])
    await host.start()
    await inventory.wait_consistent(lab)
    is_there = "a" in await stored_pods(lab)
    assert is_there or adding.exception() is not None
    if is_there:
        # ADD returned, or the agent was killed between its last log record and the reply; a runtime that
        # gets no reply calls DEL.
        assert network == BLOCKS
        if adding.exception() is None:
            await adding.result().check()
        await host.cni.delete(host.network, host.attachment("a", network=network))
    await assert_only_keepers_left(lab)
    await assert_add_check_del(host, network)
    await assert_only_keepers_left(lab)


@both
async def test_agent_killed_before_a_del_is_stored(lab: NetLab, host: Host, network: str) -> None:
    pod = await host.pod("a", network=network)
    with paused_store(lab):
        deleting = await begin_del(pod)
        host.kill()
        await asyncio.wait([deleting])
    await host.start()
    await assert_only_keepers_left(lab)
    await pod.remove()
    await assert_add_check_del(host, network)


async def test_runtime_killed_while_add_waits_for_the_store(lab: NetLab, host: Host) -> None:
    """The agent notices the closed connection and undoes the ADD; no DEL is needed."""
    with paused_store(lab):
        adding = await begin_add(host, CLAIMS)
        adding.cancel()
        await asyncio.wait([adding])
    await assert_only_keepers_left(lab)
    assert "eth0" not in inventory.devices(host.make_netns("a"))
    await assert_add_check_del(host, CLAIMS)
    await assert_only_keepers_left(lab)


@both
async def test_del_right_after_the_runtime_was_killed(lab: NetLab, host: Host, network: str) -> None:
    """DEL waits for the ADD in progress, succeeds, and the next ADD of the same container works."""
    with paused_store(lab):
        adding = await begin_add(host, network)
        adding.cancel()
        await asyncio.wait([adding])
        deleting = asyncio.create_task(host.cni.delete(host.network, host.attachment("a", network=network)))
        await asyncio.sleep(0)  # let the DEL start before the store continues
    await deleting
    await assert_add_check_del(host, network)
    await assert_only_keepers_left(lab)


@both
async def test_runtime_killed_during_del(lab: NetLab, host: Host, network: str) -> None:
    """The DEL completes without a client."""
    pod = await host.pod("a", network=network)
    with paused_store(lab):
        deleting = await begin_del(pod)
        deleting.cancel()
        await asyncio.wait([deleting])
    await assert_only_keepers_left(lab)
    await assert_add_check_del(host, network)


@both
async def test_a_request_whose_client_left_before_it_was_read_is_ignored(
    lab: NetLab, host: Host, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped agent has requests of disconnected clients in its socket queue; it attaches nothing for them."""
    with host.agent.paused(), monkeypatch.context() as impatient:
        impatient.setenv("WEFT_CNI_DEADLINE_MS", "500")
        with pytest.raises(CniError) as caught:
            await host.pod("a", network=network)
    assert caught.value.code == Code.TRY_LATER
    await host.ready()
    await assert_only_keepers_left(lab)
    await assert_add_check_del(host, network)


async def test_the_agent_reports_its_reason_before_the_shim_times_out(
    lab: NetLab, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-050, C-068: the runtime gets the agent's reason, and the ADD is undone when it completes later."""
    monkeypatch.setenv("WEFT_CNI_DEADLINE_MS", "8000")
    with paused_store(lab), pytest.raises(CniError) as caught:
        await host.pod("a", network=CLAIMS)
    assert caught.value.code == Code.TRY_LATER
    assert caught.value.message != "the weft agent did not answer in time"
    monkeypatch.undo()
    await assert_only_keepers_left(lab)
    await assert_add_check_del(host, CLAIMS)
