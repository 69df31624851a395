"""A segment behind Open vSwitch, by frames: what a port may say, who hears it, who is reached (R9, bridge.md)."""

from __future__ import annotations

import asyncio
import struct
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address

import pytest
from tests.support import inventory
from tests.support.echoes import is_answered
from tests.support.ethernet import (
    ARP,
    BROADCAST,
    IPV4,
    REPLY,
    VLAN,
    arp,
    datagram,
    frame,
    hears,
    is_arp,
    is_from,
    wire_of,
)
from tests.support.external_hosts import host_place

from weft.domain.addresses import Address, parse_address
from weft.lab import traffic
from weft.lab.hosts import Host, Pod
from weft.lab.http_services import hears as heard_at
from weft.lab.http_services import saying_names
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually

GATEWAYS = {4: "10.1.255.254", 6: "2001:db8:1::1"}


@pytest.fixture
def fwdmode() -> str:
    return "bridge"


@pytest.fixture
async def host(lab: NetLab) -> Host:
    """One that has a network."""
    await segment(lab)
    return await lab.host("one")


async def segment(lab: NetLab) -> None:
    await lab.network(
        "net", subnet="10.1.0.0/16", gateway=GATEWAYS[4], ipv6Subnet="2001:db8:1::/64", ipv6Gateway=GATEWAYS[6]
    )


async def flood(lab: NetLab, host: Host) -> None:
    """Questions go to everyone from now on."""
    (await lab.rest.put("globals", name="global", fwdMode="bridge", arpMode="flood")).accepted()
    switch = host.switch
    assert switch is not None
    flows = partial(asyncio.to_thread, switch.dump_flows, "contivVxlanBridge")
    await eventually(flows, lambda found: any("dl_dst=01:00:00:00:00:00/01:00:00:00:00:00" in flow for flow in found))


def mac_of(pod: Pod) -> str:
    (link,) = inventory.ask(pod.netns, "ip", "-j", "link", "show", "eth0")
    return str(link["address"])


def address_of(pod: Pod) -> Address:
    return parse_address(str(pod.address()), field="pod")


def neighbour(pod: Pod, other: Pod, *, family: int) -> str:
    """The MAC that a pod has found for another."""
    (entry,) = inventory.ask(pod.netns, "ip", "-j", f"-{family}", "neigh", "show", str(other.address(family)))
    return str(entry["lladdr"])


@pytest.mark.parametrize("family", [4, 6])
async def test_the_switch_answers_and_nobody_else_is_asked(host: Host, family: int) -> None:
    """R9, W40: whether an agent runs or not, the real MAC of who is asked for comes from the switch."""
    one, two, three = [await host.pod(name, network="net") for name in ("a", "b", "c")]
    host.kill()
    with wire_of(three.namespace) as ear:
        assert await one.reaches(two, family=family)
        assert neighbour(one, two, family=family) == mac_of(two)
        assert not await asyncio.to_thread(hears, ear, is_from(mac_of(one)))


async def test_questions_are_flooded_where_the_cluster_says_so(lab: NetLab, host: Host) -> None:
    """N9: also to those who came later."""
    one, two = [await host.pod(name, network="net") for name in ("a", "b")]
    await flood(lab, host)
    late = await host.pod("late", network="net")
    for family, asks in ((4, is_arp), (6, lambda data: data[:2] == b"\x33\x33" and is_from(mac_of(one))(data))):
        with wire_of(late.namespace) as ear:
            assert await one.reaches(two, family=family)
            assert neighbour(one, two, family=family) == mac_of(two)
            assert await asyncio.to_thread(hears, ear, asks, within=DEADLINE)


async def test_a_pod_speaks_of_no_address_but_its_own(lab: NetLab, host: Host) -> None:
    """ARP of another address or MAC reaches nobody, not even where all is flooded; that of its own does."""
    one, two, three = [await host.pod(name, network="net") for name in ("a", "b", "c")]
    await flood(lab, host)
    own, its = (mac_of(one), address_of(one)), (mac_of(two), address_of(two))
    with wire_of(one.namespace) as mouth, wire_of(two.namespace, ARP) as ear:
        for claimed, mac in (((own[0], address_of(three)), own[0]), (("02:00:00:00:00:66", own[1]), own[0])):
            for target in (its[0], BROADCAST):
                mouth.send(frame(target, mac, ARP, arp(REPLY, sender=claimed, target=its)))
        mouth.send(frame(its[0], "02:00:00:00:00:66", ARP, arp(REPLY, sender=own, target=its)))
        assert not await asyncio.to_thread(hears, ear, is_arp)
        mouth.send(frame(its[0], own[0], ARP, arp(REPLY, sender=own, target=its)))
        assert await asyncio.to_thread(hears, ear, is_arp, within=DEADLINE)


async def test_what_cannot_be_judged_passes_no_segment(host: Host) -> None:
    """Frames with VLAN tags, of other kinds or for all, and those for one's MAC and another's address."""
    one, two, three = [await host.pod(name, network="net") for name in ("a", "b", "c")]
    own, its = mac_of(one), mac_of(two)
    packet = datagram(address_of(one), address_of(two))
    with wire_of(one.namespace) as mouth, wire_of(two.namespace) as ear:
        for target in (its, BROADCAST, "01:00:5e:00:00:fb"):
            mouth.send(frame(target, own, VLAN, struct.pack(">HH", 5, IPV4) + packet))
            mouth.send(frame(target, own, 0x88CC, b"lldp"))
        mouth.send(frame(BROADCAST, own, IPV4, packet))
        mouth.send(frame(its, own, IPV4, datagram(address_of(one), address_of(three))))
        assert not await asyncio.to_thread(hears, ear, is_from(own))
        mouth.send(frame(its, own, IPV4, packet))
        assert await asyncio.to_thread(hears, ear, is_from(own), within=DEADLINE)


@pytest.mark.parametrize("family", [4, 6])
async def test_only_the_segments_own_gateway_answers(lab: NetLab, host: Host, family: int) -> None:
    """Nobody routes between networks, and no gateway answers for another one."""
    await lab.network("other", subnet="10.2.0.0/16", gateway="10.2.255.254", ipv6Subnet="2001:db8:2::/64")
    one, other = await host.pod("a", network="net"), await host.pod("b", network="other")
    assert await is_answered(one.place(family), GATEWAYS[family])
    assert not await is_answered(other.place(family), GATEWAYS[family])


async def test_a_segment_may_be_on_both_datapaths(lab: NetLab) -> None:
    """Between nodes frames look alike, whatever carries them there, answered by the nodes or flooded."""
    await segment(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two", datapath="linux"))
    for mode in ("proxy", "flood"):
        if mode == "flood":
            await flood(lab, one)
        a, b = [await host.pod(f"{mode}-{host.name}", network="net") for host in (one, two)]
        for family in (4, 6):
            assert await a.reaches(b, family=family), f"{mode}, v{family}"
            assert await b.reaches(a, family=family), f"{mode}, v{family}"
            assert neighbour(a, b, family=family) == mac_of(b)


async def test_services_and_hosts_find_back_across_datapaths(lab: NetLab) -> None:
    """Whoever translates, in whichever network callers are: what answers goes back to where the call came from."""
    await segment(lab)
    await lab.network("other", subnet="10.2.0.0/24", gateway="10.2.0.254")
    service = {"tenantName": "default", "serviceName": "shop", "networkName": "net", "ipAddress": "10.1.0.200"}
    (await lab.rest.put("serviceLBs", **service, selectors=["app=web"], ports=["80:8080:TCP"])).accepted()
    hosts = await asyncio.gather(lab.host("one"), lab.host("two", datapath="linux"))
    providers = [await host.pod(f"provider-{host.name}", network="net") for host in hosts]
    clients = [await host.pod(f"client-{host.name}", network="other") for host in hosts]
    for pod in providers:
        call = {"Event": "start", "Tenant": "default", "EndpointID": pod.name, "Labels": {"app": "web"}}
        (await lab.rest.post("/plugin/updateEndpoint", call)).accepted()
    wanted = {pod.name for pod in providers}
    async with saying_names(providers, port=8080):
        for client in (*clients, *providers):
            await eventually(partial(all_heard, client), wanted.__eq__)
    with ExitStack() as closing:
        for host, pod in zip(hosts, reversed(providers), strict=True):
            assert await traffic.reaches(host_place(host, closing, 4), pod.place(), port=80), f"host {host.name}"


async def all_heard(client: Pod) -> set[str]:
    """Everybody who answers at the service's address."""
    return {await heard_at(client.place(), ip_address("10.1.0.200"), port=80) for _ in range(12)}
