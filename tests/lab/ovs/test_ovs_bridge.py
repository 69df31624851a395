"""Bridge mode on Open vSwitch, checked with frames: spoofing, ARP and ND, forwarding (R9, bridge.md)."""

from __future__ import annotations

import asyncio
import struct
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address

import pytest
from tests.support import inventory
from tests.support.ethernet import (
    ARP,
    BROADCAST,
    IPV4,
    REPLY,
    VLAN,
    arp,
    datagram,
    frame,
    is_arp,
    is_from,
    open_packet_socket,
    receives,
)
from tests.support.external_hosts import host_netns_address
from tests.support.icmp_echo import is_answered

from weft.domain.addresses import Address, parse_address
from weft.lab import traffic
from weft.lab.hosts import Host, Pod
from weft.lab.http_services import query_backend as heard_at
from weft.lab.http_services import serving_names
from weft.lab.netlab import NetLab
from weft.lab.waiting import DEADLINE, eventually

GATEWAYS = {4: "10.1.255.254", 6: "2001:db8:1::1"}


@pytest.fixture
def fwdmode() -> str:
    return "bridge"


@pytest.fixture
async def host(lab: NetLab) -> Host:
    """A host with a network."""
    await segment(lab)
    return await lab.host("one")


async def segment(lab: NetLab) -> None:
    await lab.network(
        "net", subnet="10.1.0.0/16", gateway=GATEWAYS[4], ipv6Subnet="2001:db8:1::/64", ipv6Gateway=GATEWAYS[6]
    )


async def flood(lab: NetLab, host: Host) -> None:
    """Set `arpMode` flood, and wait for the flows."""
    (await lab.rest.put("globals", name="global", fwdMode="bridge", arpMode="flood")).accepted()
    switch = host.switch
    assert switch is not None
    flows = partial(asyncio.to_thread, switch.dump_flows, "contivVxlanBridge")
    await eventually(flows, lambda found: any("dl_dst=01:00:00:00:00:00/01:00:00:00:00:00" in flow for flow in found))


def mac_of(pod: Pod) -> str:
    (link,) = inventory.run_json(pod.netns, "ip", "-j", "link", "show", "eth0")
    return str(link["address"])


def address_of(pod: Pod) -> Address:
    return parse_address(str(pod.address()), field="pod")


def neighbour_mac(pod: Pod, other: Pod, *, family: int) -> str:
    """The MAC in a pod's neighbour entry for another."""
    (entry,) = inventory.run_json(pod.netns, "ip", "-j", f"-{family}", "neigh", "show", str(other.address(family)))
    return str(entry["lladdr"])


@pytest.mark.parametrize("family", [4, 6])
async def test_the_switch_answers_arp_and_nd_without_flooding(host: Host, family: int) -> None:
    """R9, W40: the switch answers with the real MAC, whether the agent runs or not."""
    one, two, three = [await host.pod(name, network="net") for name in ("a", "b", "c")]
    host.kill()
    with open_packet_socket(three.namespace) as capture:
        assert await one.eventually_reaches(two, family=family)
        assert neighbour_mac(one, two, family=family) == mac_of(two)
        assert not await asyncio.to_thread(receives, capture, is_from(mac_of(one)))


async def test_arp_and_nd_requests_are_flooded_with_arp_mode_flood(lab: NetLab, host: Host) -> None:
    """N9: also to pods that are plugged later."""
    one, two = [await host.pod(name, network="net") for name in ("a", "b")]
    await flood(lab, host)
    late = await host.pod("late", network="net")
    for family, matches in ((4, is_arp), (6, lambda data: data[:2] == b"\x33\x33" and is_from(mac_of(one))(data))):
        with open_packet_socket(late.namespace) as capture:
            assert await one.eventually_reaches(two, family=family)
            assert neighbour_mac(one, two, family=family) == mac_of(two)
            assert await asyncio.to_thread(receives, capture, matches, within=DEADLINE)


async def test_spoofed_arp_and_nd_is_dropped(lab: NetLab, host: Host) -> None:
    """ARP with another address or MAC is dropped, even with flooding; correct ARP arrives."""
    one, two, three = [await host.pod(name, network="net") for name in ("a", "b", "c")]
    await flood(lab, host)
    own, its = (mac_of(one), address_of(one)), (mac_of(two), address_of(two))
    with open_packet_socket(one.namespace) as sender, open_packet_socket(two.namespace, ARP) as capture:
        for claimed, mac in (((own[0], address_of(three)), own[0]), (("02:00:00:00:00:66", own[1]), own[0])):
            for target in (its[0], BROADCAST):
                sender.send(frame(target, mac, ARP, arp(REPLY, sender=claimed, target=its)))
        sender.send(frame(its[0], "02:00:00:00:00:66", ARP, arp(REPLY, sender=own, target=its)))
        assert not await asyncio.to_thread(receives, capture, is_arp)
        sender.send(frame(its[0], own[0], ARP, arp(REPLY, sender=own, target=its)))
        assert await asyncio.to_thread(receives, capture, is_arp, within=DEADLINE)


async def test_a_frame_whose_mac_and_address_disagree_is_dropped(host: Host) -> None:
    """So are tagged, non-IP and broadcast frames; a correct frame arrives."""
    one, two, three = [await host.pod(name, network="net") for name in ("a", "b", "c")]
    own, its = mac_of(one), mac_of(two)
    packet = datagram(address_of(one), address_of(two))
    with open_packet_socket(one.namespace) as sender, open_packet_socket(two.namespace) as capture:
        for target in (its, BROADCAST, "01:00:5e:00:00:fb"):
            sender.send(frame(target, own, VLAN, struct.pack(">HH", 5, IPV4) + packet))
            sender.send(frame(target, own, 0x88CC, b"lldp"))
        sender.send(frame(BROADCAST, own, IPV4, packet))
        sender.send(frame(its, own, IPV4, datagram(address_of(one), address_of(three))))
        assert not await asyncio.to_thread(receives, capture, is_from(own))
        sender.send(frame(its, own, IPV4, packet))
        assert await asyncio.to_thread(receives, capture, is_from(own), within=DEADLINE)


@pytest.mark.parametrize("family", [4, 6])
async def test_only_the_gateway_of_the_own_network_answers(lab: NetLab, host: Host, family: int) -> None:
    """Networks are not routed, and a gateway does not answer pods of another network."""
    await lab.network("other", subnet="10.2.0.0/16", gateway="10.2.255.254", ipv6Subnet="2001:db8:2::/64")
    one, other = await host.pod("a", network="net"), await host.pod("b", network="other")
    assert await is_answered(one.place(family), GATEWAYS[family])
    assert not await is_answered(other.place(family), GATEWAYS[family])


async def test_a_segment_may_be_on_both_datapaths(lab: NetLab) -> None:
    """Both datapaths use the same frames between nodes, with `arpMode` proxy and flood."""
    await segment(lab)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two", datapath="linux"))
    for mode in ("proxy", "flood"):
        if mode == "flood":
            await flood(lab, one)
        a, b = [await host.pod(f"{mode}-{host.name}", network="net") for host in (one, two)]
        for family in (4, 6):
            assert await a.eventually_reaches(b, family=family), f"{mode}, v{family}"
            assert await b.eventually_reaches(a, family=family), f"{mode}, v{family}"
            assert neighbour_mac(a, b, family=family) == mac_of(b)


async def test_replies_of_services_and_hosts_return_across_datapaths(lab: NetLab) -> None:
    """Replies return to the node that did the NAT, whichever network the client is in."""
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
    async with serving_names(providers, port=8080):
        for client in (*clients, *providers):
            await eventually(partial(all_backends, client), wanted.__eq__)
    with ExitStack() as closing:
        for host, pod in zip(hosts, reversed(providers), strict=True):
            assert await traffic.eventually_reaches(host_netns_address(host, closing, 4), pod.place(), port=80), (
                f"host {host.name}"
            )


async def all_backends(client: Pod) -> set[str]:
    """All backends that answer at the service address."""
    return {await heard_at(client.place(), ip_address("10.1.0.200"), port=80) for _ in range(12)}
