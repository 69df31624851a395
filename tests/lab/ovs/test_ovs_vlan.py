"""Networks of VLAN tags over uplinks (contiv 7.1, 7.6, 7.7): between hosts, with machines outside, and beside vxlan."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.connectivity import SILENCE_S
from tests.support.ethernet import (
    ARP,
    BROADCAST,
    IPV4,
    REQUEST,
    arp,
    datagram,
    frame,
    hears,
    is_arp,
    is_from,
    tag_heard,
    tagged,
    wire_of,
)
from tests.support.external_hosts import host_place
from tests.support.modes import BOTH_MODES
from tests.support.switch_inventory import VLAN_BRIDGE, uplinks

from weft.adapters.netns.kernel_state import overlay_mac
from weft.domain.addresses import Address, parse_address
from weft.kernel.netns import Namespace
from weft.lab import traffic
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually, until

TAG = 100
HERE = Path("/proc/self/ns/net")
OUTSIDER = ("52:54:00:00:00:77", parse_address("10.1.0.77", field="outsider"))


@pytest.fixture
def netmode() -> str:
    return "vlan"


async def two_hosts(lab: NetLab) -> tuple[Host, Host]:
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64", pktTag=TAG)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    return one, two


@pytest.fixture
def outside(apart: None) -> Iterator[socket.socket]:
    """The place of a machine on the second wire that is not of the cluster."""
    with ExitStack() as closing:
        here = closing.enter_context(Namespace.current())
        inventory.run(HERE, "ip link add out0 type veth peer name out1")
        inventory.run(HERE, "ip link set out0 up")
        inventory.run(HERE, "ip link set out1 up")
        yield closing.enter_context(wire_of(here, interface="out0"))


def plug_outsider() -> None:
    inventory.run(HERE, "ip link set out1 master trunk")


def address_of(pod: Pod) -> Address:
    return parse_address(str(pod.address()), field="pod")


def mac_of(pod: Pod) -> str:
    (link,) = inventory.ask(pod.netns, "ip", "-j", "link", "show", "eth0")
    return str(link["address"])


@BOTH_MODES
async def test_frames_between_hosts_have_the_networks_tag(lab: NetLab) -> None:
    """And they go by the uplink, with no tunnel around them."""
    one, two = await two_hosts(lab)
    a, b = await one.pod("a", network="net"), await two.pod("b", network="net")
    with Namespace.current() as here, wire_of(here, interface=f"{two.cable}-eth1") as ear:
        for family in (4, 6):
            assert await a.reaches(b, family=family)
            assert await b.reaches(a, family=family)
        assert await asyncio.to_thread(tag_heard, ear, lambda data: data[12:14] != b"\x08\x06", within=DEADLINE) == TAG
    assert one.switch is not None
    assert one.switch.configure("list-ports", VLAN_BRIDGE).split() == ["uplinkPort", "weft-vlan-up"]


@BOTH_MODES
async def test_a_group_may_have_a_tag_of_its_own(lab: NetLab) -> None:
    """contiv 5.1: it overrides the network's. Groups with different tags are no neighbours."""
    one, two = await two_hosts(lab)
    await lab.group("own", network="net", pktTag=TAG + 1)
    a, b = [await host.pod(f"own-{host.name}", network="net", group="own") for host in (one, two)]
    with Namespace.current() as here, wire_of(here, interface=f"{two.cable}-eth1") as ear:

        async def heard() -> int | None:
            assert await a.reaches(b)
            assert await a.reaches(b, family=6)
            return await asyncio.to_thread(tag_heard, ear, lambda data: data[12:14] != b"\x08\x06", within=DEADLINE)

        # Where nodes route, the way to a node's addresses is there before the news of who has one of them.
        await eventually(heard, lambda tag: tag == TAG + 1)
    c, d = [await host.pod(f"usual-{host.name}", network="net") for host in (one, two)]
    one.kill()
    await one.start()
    for source, target in ((a, b), (b, a), (c, d), (d, c)):
        assert await source.reaches(target), f"{source.name} to {target.name}"
    for other in (c, d):
        assert await (a.never_reaches(other) if lab.fwdmode == "bridge" else a.reaches(other))
    for pod in (a, b):
        await pod.remove()
    await eventually(lambda: lab.rest.delete("endpointGroups", "default:own"), lambda answer: answer.status == 200)
    await lab.network("heir", subnet="10.2.0.0/16", pktTag=TAG + 1)
    e, f = [await host.pod(f"heir-{host.name}", network="heir") for host in (one, two)]
    assert await e.reaches(f)


@BOTH_MODES
async def test_tenants_may_have_the_same_address_on_different_hosts(lab: NetLab) -> None:
    """N6, W42: then one MAC is at both, with different tags, and who has just spoken hides nobody."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pairs: dict[str, tuple[Pod, Pod]] = {}
    for tenant, hosts in (("blue", (one, two)), ("red", (two, one))):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet="10.9.0.0/24", ipv6Subnet="2001:db8:9::/64")
        first, second = [await host.pod(f"{tenant}-{host.name}", tenant=tenant, network="net") for host in hosts]
        pairs[tenant] = (first, second)
    assert pairs["blue"][0].address() == pairs["red"][0].address()
    for family, (own, others) in itertools.product((4, 6), itertools.permutations(pairs.values())):
        assert await others[0].reaches(others[1], family=family)
        assert await own[1].reaches(own[0], family=family)


@BOTH_MODES
async def test_tenants_with_the_same_subnets_never_meet(lab: NetLab) -> None:
    """N6, W42: their tags tell them apart, also where nodes route."""
    hosts = await asyncio.gather(lab.host("one"), lab.host("two"))
    pods: dict[str, list[Pod]] = {}
    for tenant in ("red", "blue"):
        await lab.tenant(tenant)
        await lab.network("net", tenant=tenant, subnet="10.1.0.0/24", gateway="10.1.0.254")
        pods[tenant] = [
            await host.pod(f"{tenant}-{host.name}", tenant=tenant, network="net", address=f"10.1.0.{number}")
            for number, host in enumerate(hosts, start=1)
        ]
    for own, others in (("red", "blue"), ("blue", "red")):
        assert await pods[own][0].reaches(pods[own][1])
        await pods[others][1].remove()
        # Of the same address only the other tenant's is left on the far host.
        assert await pods[others][0].never_reaches(pods[own][1])
        pods[others][1] = await hosts[1].pod(f"{others}-again", tenant=others, network="net", address="10.1.0.2")


async def test_networks_of_both_kinds_are_routed_between(lab: NetLab) -> None:
    """A network's encap is its own: one of each in a tenant, on two hosts."""
    one, two = await two_hosts(lab)
    await lab.network("tunnelled", subnet="10.2.0.0/16", encap="vxlan")
    a, b = await one.pod("a", network="net"), await two.pod("b", network="tunnelled")
    c, d = await one.pod("c", network="tunnelled"), await two.pod("d", network="net")
    for source, target in ((a, b), (b, a), (a, d), (c, b), (c, a)):
        assert await source.reaches(target), f"{source.name} to {target.name}"


@pytest.mark.parametrize("fwdmode", ["bridge"])
@pytest.mark.parametrize("mode", ["proxy", "flood"])
async def test_a_machine_outside_is_a_neighbour(lab: NetLab, outside: socket.socket, mode: str) -> None:
    """It finds pods and is found by its tag and by nobody else's; what it says is judged (W41)."""
    one, two = await two_hosts(lab)
    (await lab.rest.put("globals", name="global", fwdMode="bridge", arpMode=mode)).accepted()
    plug_outsider()
    pod, other = await one.pod("a", network="net"), await two.pod("b", network="net")
    own, its = OUTSIDER, (mac_of(pod), address_of(pod))
    asks = frame(BROADCAST, own[0], ARP, arp(REQUEST, sender=own, target=("00:00:00:00:00:00", its[1])))
    answers = partial(tag_heard, outside, lambda data: is_arp(data) and is_from(its[0])(data))
    outside.send(tagged(TAG + 1, asks))
    assert await asyncio.to_thread(answers, within=SILENCE_S) is None
    outside.send(tagged(TAG, asks))
    assert await asyncio.to_thread(answers, within=DEADLINE) == TAG
    with pod.place().open_caller(traffic.UDP) as mouth:
        mouth.sendto(b"?", (str(own[1]), 5000))
        assert await asyncio.to_thread(answers, within=DEADLINE) == TAG  # it is asked for
    with wire_of(pod.namespace) as ear, wire_of(other.namespace) as elsewhere:
        outside.send(tagged(TAG, frame(its[0], own[0], IPV4, datagram(own[1], its[1]))))
        assert await asyncio.to_thread(hears, ear, is_from(own[0]), within=DEADLINE)
        assert not await asyncio.to_thread(hears, elsewhere, lambda data: is_from(own[0])(data) and not is_arp(data))


@pytest.mark.parametrize("fwdmode", ["bridge"])
async def test_an_address_that_comes_to_another_host_is_found_there(lab: NetLab) -> None:
    """Though whoever has it now says nothing, and switches between the hosts have seen its MAC elsewhere."""
    lab.teach_trunk()
    one, two = await two_hosts(lab)
    client = await one.pod("client", network="net")
    for name, host, other in (("first", one, two), ("second", two, one)):
        pod = await host.pod(name, network="net", address="10.1.0.99/16")
        beyond = await other.pod(f"beyond-{name}", network="net")
        assert await client.reaches(pod)
        assert await pod.reaches(beyond)
        await pod.remove()


@BOTH_MODES
async def test_nobody_beyond_the_uplinks_is_the_host(lab: NetLab, outside: socket.socket) -> None:
    """W41: a pod that nobody may call is called by its host, and not by who says that it is this host."""
    (await lab.rest.put("policys", tenantName="default", policyName="closed")).accepted()
    rule = {"policyName": "closed", "ruleId": "1", "priority": 1, "direction": "in", "action": "deny"}
    (await lab.rest.put("rules", tenantName="default", **rule)).accepted()
    one, _ = await two_hosts(lab)
    await lab.group("shut", network="net", policies=["closed"])
    plug_outsider()
    pod = await one.pod("a", network="net", group="shut")
    host = parse_address(one.address, field="host")
    target = mac_of(pod) if lab.fwdmode == "bridge" else overlay_mac(host)
    with wire_of(pod.namespace) as ear:
        outside.send(tagged(TAG, frame(target, OUTSIDER[0], IPV4, datagram(host, address_of(pod)))))
        assert not await asyncio.to_thread(hears, ear, lambda data: data[26:30] == host.number.to_bytes(4, "big"))
    with ExitStack() as closing:
        assert await traffic.reaches(host_place(one, closing, 4), pod.place(), port=80)


async def test_the_hosts_own_address_on_an_uplink_is_not_cut(lab: NetLab) -> None:
    """W33: it is reached before, while and after the uplink carries networks."""
    one, two = await two_hosts(lab)
    with ExitStack() as closing:
        places = []
        for number, host in enumerate((one, two), start=1):
            inventory.run(host.machine, f"ip address add 198.51.100.{number}/24 dev eth1")
            namespace = closing.enter_context(Namespace.open(host.machine))
            places.append(traffic.Place(namespace, ip_address(f"198.51.100.{number}")))
        a, b = await one.pod("a", network="net"), await two.pod("b", network="net")
        for again in (False, True):
            if again:
                one.kill()
                await one.start()
            assert await a.reaches(b)
            assert await traffic.reaches(*places, port=80)
            assert await traffic.reaches(*reversed(places), port=80)


async def test_an_uplink_that_is_not_there_is_told(lab: NetLab) -> None:
    """The node is not ready and names the way out; when it has come all is well, without a restart."""
    await lab.network("net", subnet="10.1.0.0/16", pktTag=TAG)
    host = await lab.host("one")
    host.kill()
    inventory.run(host.machine, "ip link set eth1 name away0")
    host.launch()
    log = host.home / "netplugin.log"
    await until(lambda: "uplink eth1 is not on this machine: name others by --vlan-uplinks" in log.read_text())
    inventory.run(host.machine, "ip link set away0 name eth1")
    await host.ready()
    switch = host.switch
    assert switch is not None
    await eventually(partial(asyncio.to_thread, uplinks, switch), lambda found: found == {"eth1"})
