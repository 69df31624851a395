"""CHECK compares the kernel with what was made, item by item; STATUS says why not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from weft.cni.errors import CniError, Code
from weft.testing import inventory
from weft.testing.hosts import Host, Pod
from weft.testing.netlab import NetLab
from weft.testing.waiting import eventually

TRIES = 20

IN_POD = {
    "ip link set eth0 down": "eth0 is down",
    "ip addr flush dev eth0 scope global": "{address}",
    "ip route del default": "0.0.0.0/0",
    "ip link set eth0 address 02:00:00:00:00:77": "02:00:00:00:00:77",
    "ip neigh flush dev eth0 nud permanent": "neighbour",
    "ip link set eth0 name eth7": "eth0 is missing",
}
IN_SPACE = {
    "ip link set {port} down": "{port} is down",
    "ip link del {port}": "{port} is missing",
    "ip route del {address} dev {port}": "{address}",
    "ip neigh del {address} dev {port}": "{address}",
    "nft flush set inet weft ports4": "{address}",
}


async def test_each_thing_that_is_broken_is_named(lab: NetLab) -> None:
    host = await lab.host("one")
    await host.pod("other")
    for place, breaks in (("pod", IN_POD), ("space", IN_SPACE)):
        for command, expected in breaks.items():
            pod = await host.pod("a")
            await pod.check()
            words = {"address": str(pod.address()), "port": _port(pod)}
            breaking = partial(
                inventory.run, pod.netns if place == "pod" else host.tenants.path / "default", command.format(**words)
            )
            assert expected.format(**words) in str(await _told_of_break(pod, breaking))
            await pod.remove()
    pod = await host.pod("a")
    host.remove_netns("a")
    with pytest.raises(CniError, match="does not exist"):
        await pod.check()
    await pod.detach()
    with pytest.raises(CniError) as told:
        await pod.check()
    assert told.value.code == Code.UNKNOWN_CONTAINER


async def _told_of_break(pod: Pod, breaking: Callable[[], None]) -> CniError:
    """What CHECK says after it. The agent mends within a moment and may be quicker: then it is broken again."""
    for _ in range(TRIES):
        breaking()
        try:
            await pod.check()
        except CniError as error:
            return error
    raise AssertionError(f"CHECK found nothing {TRIES} times")


def _port(pod: Pod) -> str:
    return pod.result.interfaces[0].name


async def test_what_drifted_is_mended_by_a_restart(lab: NetLab) -> None:
    """R5: with a different state the kernel is brought back to what was noted."""
    await lab.network("net", subnet="10.1.0.0/16", ipv6Subnet="2001:db8:1::/64")
    host = await lab.host("one")
    a, b = await host.pod("a", network="net"), await host.pod("b", network="net")
    space = host.tenants.path / "default"
    for family in (4, 6):
        inventory.run(space, f"ip -{family} route del {a.address(family)} dev {_port(a)}")
    inventory.run(space, f"ip link set {_port(b)} down")
    inventory.run(space, "nft flush ruleset")
    host.kill()
    await host.start()
    await a.check()
    await b.check()
    for family in (4, 6):
        assert await a.reaches(b, family=family)
    assert await inventory.differences(lab) == []


async def test_equal_state_is_not_touched_by_a_restart(lab: NetLab) -> None:
    """R5: no port is made anew."""
    host = await lab.host("one")
    pods = [await host.pod(name) for name in "abc"]
    before = _indexes(host)
    for _ in range(2):
        host.kill()
        await host.start()
    assert _indexes(host) == before
    for pod in pods:
        await pod.check()


def _indexes(host: Host) -> dict[str, int]:
    space = host.tenants.path / "default"
    return {link["ifname"]: link["ifindex"] for link in inventory.ask(space, "ip", "-j", "link")}


async def test_numbers_that_are_taken_are_passed_over(lab: NetLab) -> None:
    """R6: the numbers an agent would give its next devices are others' already."""
    host = await lab.host("one")
    await host.pod("first")
    host.kill()
    await host.start()  # its count begins behind the numbers that are in use in its spaces
    netns = host.make_netns("a")
    for number in range(1, 4):
        inventory.run(netns, f"ip link add x{number} index {(1 << 16) + 2 * number + 1} type veth peer name y{number}")
    pod = await host.pod("a")
    await pod.check()


async def test_status_says_why_not(lab: NetLab) -> None:
    host = await lab.host("one", "--offline-limit", "1")
    await host.cni.status(host.network)
    await lab.partition(host)

    async def reason() -> str:
        try:
            await host.cni.status(host.network)
        except CniError as error:
            assert error.code in {Code.UNAVAILABLE, 51}
            return error.message
        return ""

    assert "store" in await eventually(reason, bool)
    lab.heal(host)
    await eventually(reason, lambda told: told == "")
    host.kill()
    assert "away" in await reason()
