"""Bridge mode: a network is an L2 segment, nothing routes between networks (contiv 7.5, 7.8; N3, N4, N8, N9, R9)."""

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
_FLOOD_MAC, _FLOOD_FLOW_MATCH = "00:00:00:00:00:00", "dl_dst=01:00:00:00:00:00/01:00:00:00:00:00"

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


async def assert_all_reach(near: Pod, other: Pod, far: Pod, *, family: int) -> None:
    """Assert that pods of a network reach each other, on one host and across hosts."""
    for source, target in ((near, other), (near, far), (far, other), (far, near)):
        assert await source.eventually_reaches(target, family=family), f"{source.name} to {target.name}, v{family}"


@pytest.mark.parametrize("family", [4, 6])
async def test_a_network_is_one_segment_and_networks_are_isolated(hosts: list[Host], family: int) -> None:
    """N2, N3, N4: pods of a network reach each other, on one host and across hosts; never those of another network."""
    one, two = hosts
    near, other, far = (
        await one.pod("a", network="net"),
        await one.pod("c", network="net"),
        await two.pod("b", network="net"),
    )
    isolated = await one.pod("d", network="other")
    await assert_all_reach(near, other, far, family=family)
    for pod in (near, far):
        assert await pod.never_reaches(isolated, family=family)
        assert await isolated.never_reaches(pod, family=family, transport=UDP)


def is_flooded(host: Host) -> bool:
    """Whether the node floods multicast and broadcast frames to its peers."""
    if host.switch is not None:
        return any(_FLOOD_FLOW_MATCH in flow for flow in host.switch.dump_flows(BRIDGE))
    entries = inventory.run_json(inventory.tenant_netns(host)["default"], "bridge", "-j", "fdb")
    return any(entry["mac"] == _FLOOD_MAC for entry in entries)


async def test_arp_mode_changes_with_running_pods(lab: NetLab, hosts: list[Host]) -> None:
    """N9: proxy, flood, proxy; peers receive broadcast frames only in flood mode."""
    one, two = hosts
    pods = await one.pod("a", network="net"), await one.pod("c", network="net"), await two.pod("b", network="net")
    for mode in ("proxy", "flood", "proxy"):
        (await lab.rest.put("globals", name="global", fwdMode="bridge", arpMode=mode)).accepted()
        for host in hosts:
            await eventually(partial(asyncio.to_thread, is_flooded, host), (mode == "flood").__eq__)
        for family in (4, 6):
            await assert_all_reach(*pods, family=family)
        late = await two.pod("late", network="net")
        assert await pods[0].eventually_reaches(late)
        assert await late.eventually_reaches(pods[1], family=6)
        await late.remove()
    await inventory.wait_consistent(lab)


async def test_forwarding_mode_changes_while_no_network_exists(lab: NetLab, hosts: list[Host]) -> None:
    """N8, O9: rejected while networks exist; otherwise agents change mode without a restart, to routing and back."""
    (await lab.rest.put("globals", name="global", fwdMode="routing")).refused(409, field="fwdMode")
    (await lab.rest.delete("networks", "default:default-net")).accepted()
    one, two = hosts
    for mode in ("bridge", "routing", "bridge"):
        for name in NETWORKS:
            delete_network = partial(lab.rest.delete, "networks", f"default:{name}")
            await eventually(delete_network, lambda answer: answer.status == 200)
        (await lab.rest.put("globals", name="global", fwdMode=mode)).accepted()
        await build(lab)
        near, other = [await host.pod(f"{mode}-{host.name}", network="net") for host in (one, two)]
        isolated = await two.pod(f"{mode}-other", network="other")
        for family in (4, 6):
            assert await near.eventually_reaches(other, family=family)
            reached = near.eventually_reaches if mode == "routing" else near.never_reaches
            assert await reached(isolated, family=family), f"{mode}, v{family}"
        await asyncio.gather(*(pod.remove() for pod in (near, other, isolated)))
