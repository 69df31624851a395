"""What is particular to pods behind Open vSwitch; what they share with others is asked in the tests of nodes."""

from __future__ import annotations

import asyncio
import socket

import pytest
from tests.support import inventory
from tests.support.connectivity import SILENCE_S
from tests.support.echoes import is_answered
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
    """Between nodes packets look alike, whatever carries them there."""
    await wide_network(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two", datapath="linux"))
    a, b = [await host.pod(f"on-{host.name}", network="wide") for host in (one, two)]
    for family in (4, 6):
        assert await a.reaches(b, family=family)
        assert await b.reaches(a, family=family)


@pytest.mark.parametrize("family", [4, 6])
async def test_gateways_answer_to_those_who_have_to_ask_for_them(lab: NetLab, family: int) -> None:
    """W40: ARP and neighbour discovery are answered in the switch, whether an agent runs or not."""
    await wide_network(lab)
    one = await lab.host("one")
    a = await one.pod("a", network="wide")
    one.kill()
    inventory.run(a.netns, f"ip -{family} neigh del {GATEWAYS[family]} dev eth0")
    assert await is_answered(a.place(family), GATEWAYS[family])
    (entry,) = inventory.ask(a.netns, "ip", "-j", f"-{family}", "neigh", "show", GATEWAYS[family])
    assert entry["lladdr"] == "ee:ee:ee:ee:ee:ee"


@pytest.mark.parametrize("family", [4, 6])
async def test_neighbours_are_all_behind_the_node(lab: NetLab, family: int) -> None:
    """Who takes its subnet for a link asks for its neighbours, and reaches them all the same, here and elsewhere."""
    await wide_network(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    a, near, far = (
        await one.pod("a", network="wide"),
        await one.pod("b", network="wide"),
        await two.pod("c", network="wide"),
    )
    for other in (near, far):
        inventory.run(a.netns, f"ip -{family} route add {other.address(family)} dev eth0")
        assert await a.reaches(other, family=family)


async def test_the_machine_itself_does_not_hear_pods(lab: NetLab) -> None:
    """The switch listens at the machine's devices: without a guard the kernel would hear, answer and forward too.

    What is for the machine comes to it once, by the tenant's space.
    """
    await wide_network(lab)
    one = await lab.host("one")
    a = await one.pod("a", network="wide")
    inventory.run(a.netns, f"ip route add {one.address} dev eth0")
    (device,) = [each for each in inventory.ask(one.machine, "ip", "-j", "link") if each["ifname"].startswith("wp")]
    assert not await is_answered(a.place(), one.address)  # by asking who has the address
    inventory.run(a.netns, f"ip neigh replace {one.address} lladdr {device['address']} dev eth0")
    with Namespace.open(one.machine) as machine, machine.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.bind((one.address, 5000))
        ear.setblocking(False)
        with a.place().open_caller(UDP) as mouth:
            mouth.sendto(b"?", (one.address, 5000))
        await asyncio.sleep(SILENCE_S)
        assert ear.recv(100) == b"?"
        with pytest.raises(BlockingIOError):
            ear.recv(100)


async def test_nothing_is_left_of_pods_and_tenants(lab: NetLab) -> None:
    """N7: no port, no device, no space, no number of a tenant and no flow but those that always stand."""
    one = await lab.host("one")
    switch = one.switch
    assert switch is not None
    before = switch.dump_flows(BRIDGE)
    for _ in range(2):
        await lab.tenant("blue")
        await lab.network("net", tenant="blue", subnet="10.3.0.0/16", gateway="10.3.0.1")
        pods = [await one.pod(f"pod-{number}", tenant="blue", network="net") for number in range(3)]
        assert await pods[0].reaches(pods[1])
        assert len(ports(switch)) == 6  # the pods', that of the overlay, and both legs of the tenant's space
        for pod in pods:
            await pod.remove()
        await until(lambda: not tenants(switch) and not ports(switch))
        await until(lambda: not [name for name in inventory.devices(one.machine) if name.startswith(OURS)])
        await until(lambda: not one.tenants.names())
        assert switch.dump_flows(BRIDGE) == before
        await lab.rest.delete("networks", "blue:net")
        await lab.rest.delete("tenants", "blue")


async def test_an_interface_comes_back_under_its_name_at_once(lab: NetLab) -> None:
    """The switch must not take the new device for the old one, which it may not have let go of yet."""
    await wide_network(lab)
    one = await lab.host("one")
    b = await one.pod("b", network="wide")
    for _ in range(5):
        a = await one.pod("a", network="wide")
        assert await a.reaches(b)
        await a.detach()
