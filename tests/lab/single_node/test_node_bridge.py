"""Bridge mode: a network is a segment on each node; nobody routes between two (contiv 7.5, 7.8; N3, N4, N8, N9, R9)."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from tests.support import inventory
from tests.support.modes import ON_OVS_TOO
from tests.support.switch_inventory import BRIDGE

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP
from weft.lab.waiting import eventually

NETWORKS = {
    "net": {"subnet": "10.1.0.0/16", "gateway": "10.1.255.254", "ipv6Subnet": "2001:db8:1::/64"},
    "other": {"subnet": "10.2.0.0/24", "ipv6Subnet": "2001:db8:2::/64", "ipv6Gateway": "2001:db8:2::ffff"},
}
_EVERYONE, _EVERYONE_IN_FLOWS = "00:00:00:00:00:00", "dl_dst=01:00:00:00:00:00/01:00:00:00:00:00"

pytestmark = ON_OVS_TOO


@pytest.fixture
def fwdmode() -> str:
    return "bridge"


async def build(lab: NetLab) -> None:
    for name, members in NETWORKS.items():
        await lab.network(name, **members)


@pytest.fixture
async def hosts(lab: NetLab) -> list[Host]:
    await build(lab)
    return list(await asyncio.gather(lab.host("one"), lab.host("two")))


async def meet(near: Pod, other: Pod, far: Pod, *, family: int) -> None:
    """Pods of a network reach each other, on one host and on two."""
    for source, target in ((near, other), (near, far), (far, other), (far, near)):
        assert await source.reaches(target, family=family), f"{source.name} to {target.name}, v{family}"


@pytest.mark.parametrize("family", [4, 6])
async def test_a_network_is_one_segment_and_networks_do_not_meet(hosts: list[Host], family: int) -> None:
    """N2, N3, N4: pods of a network reach each other, on one host and on two; those of another network never."""
    one, two = hosts
    near, other, far = (
        await one.pod("a", network="net"),
        await one.pod("c", network="net"),
        await two.pod("b", network="net"),
    )
    stranger = await one.pod("d", network="other")
    await meet(near, other, far, family=family)
    for pod in (near, far):
        assert await pod.never_reaches(stranger, family=family)
        assert await stranger.never_reaches(pod, family=family, transport=UDP)


def is_flooded(host: Host) -> bool:
    """Whether there is somewhere to send what is said to all."""
    if host.switch is not None:
        return any(_EVERYONE_IN_FLOWS in flow for flow in host.switch.dump_flows(BRIDGE))
    entries = inventory.ask(inventory.spaces(host)["default"], "bridge", "-j", "fdb")
    return any(entry["mac"] == _EVERYONE for entry in entries)


async def test_arp_mode_changes_under_pods(lab: NetLab, hosts: list[Host]) -> None:
    """N9: proxy, flood, proxy; peers get what is said to all only while it is flooded."""
    one, two = hosts
    pods = await one.pod("a", network="net"), await one.pod("c", network="net"), await two.pod("b", network="net")
    for mode in ("proxy", "flood", "proxy"):
        (await lab.rest.put("globals", name="global", fwdMode="bridge", arpMode=mode)).accepted()
        for host in hosts:
            await eventually(partial(asyncio.to_thread, is_flooded, host), (mode == "flood").__eq__)
        for family in (4, 6):
            await meet(*pods, family=family)
        late = await two.pod("late", network="net")
        assert await pods[0].reaches(late)
        assert await late.reaches(pods[1], family=6)
        await late.remove()
    await inventory.settled(lab)


async def test_forwarding_mode_changes_where_no_network_is(lab: NetLab, hosts: list[Host]) -> None:
    """N8, O9: refused while there are networks; then agents follow without a restart, to routing and back."""
    (await lab.rest.put("globals", name="global", fwdMode="routing")).refused(409, field="fwdMode")
    (await lab.rest.delete("networks", "default:default-net")).accepted()
    one, two = hosts
    for mode in ("bridge", "routing", "bridge"):
        for name in NETWORKS:
            told = partial(lab.rest.delete, "networks", f"default:{name}")
            await eventually(told, lambda answer: answer.status == 200)
        (await lab.rest.put("globals", name="global", fwdMode=mode)).accepted()
        await build(lab)
        near, other = [await host.pod(f"{mode}-{host.name}", network="net") for host in (one, two)]
        apart = await two.pod(f"{mode}-other", network="other")
        for family in (4, 6):
            assert await near.reaches(other, family=family)
            reached = near.reaches if mode == "routing" else near.never_reaches
            assert await reached(apart, family=family), f"{mode}, v{family}"
        await asyncio.gather(*(pod.remove() for pod in (near, other, apart)))
