"""Connectivity that is particular to Open vSwitch; the tests of nodes cover what all datapaths share."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.support import inventory
from tests.support.connectivity import SILENCE_S
from tests.support.icmp_echo import is_answered
from tests.support.switch_inventory import BRIDGE, ports, tenants

from weft.kernel.netns import Namespace
from weft.lab.netlab import NetLab
from weft.lab.traffic import UDP
from weft.lab.waiting import until

OURS = ("wp", "wx", "wl", "wefth-")
GATEWAYS = {4: "10.1.255.254", 6: "2001:db8:1::1"}


async def wide_network(lab: NetLab) -> None:
    await lab.network(
        "wide", subnet="10.1.0.0/16", gateway=GATEWAYS[4], ipv6Subnet="2001:db8:1::/64", ipv6Gateway=GATEWAYS[6]
    )


async def test_a_cluster_may_have_both_datapaths(lab: NetLab) -> None:
    """Both use the same packets between nodes."""
    await wide_network(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two", datapath="linux"))
    a, b = [await host.pod(f"on-{host.name}", network="wide") for host in (one, two)]
    for family in (4, 6):
        assert await a.eventually_reaches(b, family=family)
        assert await b.eventually_reaches(a, family=family)


@pytest.mark.parametrize("family", [4, 6])
async def test_gateways_answer_arp_and_nd(lab: NetLab, family: int) -> None:
    """W40: the switch answers, whether the agent runs or not."""
    await wide_network(lab)
    one = await lab.host("one")
    a = await one.pod("a", network="wide")
    one.kill()
    inventory.run(a.netns, f"ip -{family} neigh del {GATEWAYS[family]} dev eth0")
    assert await is_answered(a.place(family), GATEWAYS[family])
    (entry,) = inventory.run_json(a.netns, "ip", "-j", f"-{family}", "neigh", "show", GATEWAYS[family])
    assert entry["lladdr"] == "ee:ee:ee:ee:ee:ee"


@pytest.mark.parametrize("family", [4, 6])
async def test_the_node_answers_arp_and_nd_for_all_neighbours(lab: NetLab, family: int) -> None:
    """A pod with an on-link route resolves its neighbours, and reaches them on this and on another node."""
    await wide_network(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, local, remote = (
        await one.pod("a", network="wide"),
        await one.pod("b", network="wide"),
        await two.pod("c", network="wide"),
    )
    for other in (local, remote):
        inventory.run(a.netns, f"ip -{family} route add {other.address(family)} dev eth0")
        assert await a.eventually_reaches(other, family=family)


async def test_the_host_stack_is_isolated_from_pods(lab: NetLab) -> None:
    """With the userspace datapath the kernel sees the same packets: without isolation it would answer and forward too.

    A packet for the host arrives once, by the tenant netns.
    """
    await wide_network(lab)
    one = await lab.host("one")
    a = await one.pod("a", network="wide")
    inventory.run(a.netns, f"ip route add {one.address} dev eth0")
    (device,) = [each for each in inventory.run_json(one.netns, "ip", "-j", "link") if each["ifname"].startswith("wp")]
    assert not await is_answered(a.place(), one.address)  # ARP for the address
    inventory.run(a.netns, f"ip neigh replace {one.address} lladdr {device['address']} dev eth0")
    with Namespace.open(one.netns) as machine, machine.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind((one.address, 5000))
        receiver.setblocking(False)
        with a.place().open_client(UDP) as sender:
            sender.sendto(b"?", (one.address, 5000))
        await asyncio.sleep(SILENCE_S)
        assert receiver.recv(100) == b"?"
        with pytest.raises(BlockingIOError):
            receiver.recv(100)


async def test_nothing_is_left_of_deleted_pods_and_tenants(lab: NetLab) -> None:
    """N7: no port, device, netns or tenant ID, and only the base flows."""
    one = await lab.host("one")
    switch = one.switch
    assert switch is not None
    before = switch.dump_flows(BRIDGE)
    for _ in range(2):
        await lab.tenant("blue")
        await lab.network("net", tenant="blue", subnet="10.3.0.0/16", gateway="10.3.0.1")
        pods = [await one.pod(f"pod-{number}", tenant="blue", network="net") for number in range(3)]
        assert await pods[0].eventually_reaches(pods[1])
        assert len(ports(switch)) == 6  # three pods, the overlay, and the two netns ports
        for pod in pods:
            await pod.remove()
        await until(lambda: not tenants(switch) and not ports(switch))
        await until(lambda: not [name for name in inventory.devices(one.netns) if name.startswith(OURS)])
        await until(lambda: not one.tenants.names())
        assert switch.dump_flows(BRIDGE) == before
        await lab.rest.delete("networks", "blue:net")
        await lab.rest.delete("tenants", "blue")


async def test_an_interface_name_can_be_reused_at_once(lab: NetLab) -> None:
    """ovs-vswitchd must not take the new device for the old one, which it may still have open."""
    await wide_network(lab)
    one = await lab.host("one")
    b = await one.pod("b", network="wide")
    for _ in range(5):
        a = await one.pod("a", network="wide")
        assert await a.eventually_reaches(b)
        await a.detach()
