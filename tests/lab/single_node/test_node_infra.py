"""Infra networks (contiv 6.4, 10.3): every host has an interface in each of them."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address, ip_interface

import pytest
from tests.support import inventory
from tests.support.modes import BRIDGE_IN_SOAK, ON_ALL, ON_OVS_TOO, OVS_MODES_IN_SOAK

from weft.kernel.netns import Namespace
from weft.lab import traffic
from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.waiting import eventually

LONG = "an-infra-network-with-a-long-name"


def addresses(host: Host, name: str) -> list[str]:
    """The addresses of a device on a host, by name or altname; empty if it does not exist."""
    listed = inventory.run_json(host.netns, "ip", "-j", "addr")
    return [
        f"{each['local']}/{each['prefixlen']}"
        for link in listed
        if name in {link["ifname"], *link.get("altnames", ())}
        for each in link["addr_info"]
        if each["scope"] == "global"
    ]


async def places(hosts: list[Host], name: str, closing: ExitStack) -> list[traffic.NetnsAddress]:
    """Wait until all hosts have an address in an infra network, and return them."""
    found = []
    for host in hosts:
        listed = await eventually(partial(asyncio.to_thread, addresses, host, name), lambda both: len(both) == 2)
        namespace = closing.enter_context(Namespace.open(host.netns))
        found += [traffic.NetnsAddress(namespace, ip_interface(each).ip) for each in listed]
    return found


@ON_OVS_TOO
@BRIDGE_IN_SOAK
@pytest.mark.parametrize("length", [24, 16])
async def test_hosts_reach_each_other_in_every_infra_network(lab: NetLab, length: int) -> None:
    """N1, W36: each host has an address, also with a long network name, until the network is deleted."""
    hosts = [*await asyncio.gather(lab.host("one"), lab.host("two"))]
    names = ("mgmt", "storage", LONG)
    before = {host.name: inventory.devices(host.netns) for host in hosts}
    for number, name in enumerate(names):
        subnet = f"10.{60 + number}.0.0/{length}"
        await lab.network(name, subnet=subnet, ipv6Subnet=f"2001:db8:{60 + number}::/64", nwType="infra")
    with ExitStack() as closing:
        for again in (False, True):
            if again:
                hosts[0].kill()
                await hosts[0].start()
            for name in names:
                listed = await places(hosts, name, closing)
                assert len(listed) == 4
                for family in (4, 6):
                    same = [place for place in listed if place.address.version == family]
                    for source, target in itertools.permutations(same, 2):
                        assert await traffic.eventually_reaches(source, target, port=80), f"{name}, v{family}"
        endpoints = {key for key in await lab.rest.state() if key.startswith("endpoints/")}
        assert endpoints == {f"endpoints/default/{name}/{host.name}" for name in names for host in hosts}
    for name in names:
        (await lab.rest.delete("networks", f"default:{name}")).accepted()
    for host in hosts:
        await eventually(partial(asyncio.to_thread, inventory.devices, host.netns), before[host.name].__eq__)
        rules = partial(asyncio.to_thread, inventory.run_json, host.netns, "ip", "-j", "rule")
        await eventually(rules, lambda found: len(found) == 3)
    assert not [key for key in await lab.rest.state() if key.startswith(("endpoints/", "claims/addresses"))]


@ON_ALL
async def test_infra_addresses_are_restored_after_a_reboot_w32(lab: NetLab) -> None:
    """W32: a rebooted node has the same port and addresses, and is reachable."""
    hosts = [*await asyncio.gather(lab.host("one"), lab.host("two"))]
    await lab.network("mgmt", subnet="10.60.0.0/24", ipv6Subnet="2001:db8:60::/64", nwType="infra")
    with ExitStack() as closing:
        before = [place.address for place in await places(hosts, "mgmt", closing)]
    await lab.reboot(hosts[0])
    with ExitStack() as closing:
        again = await places(hosts, "mgmt", closing)
        assert [place.address for place in again] == before
        for family in (4, 6):
            one, two = (place for place in again if place.address.version == family)
            assert await traffic.eventually_reaches(one, two, port=80)
            assert await traffic.eventually_reaches(two, one, port=80)


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_data_networks_have_host_routes_where_the_host_is_on_the_overlay(lab: NetLab) -> None:
    """H1, H4: with `contivh1` every host has a route to each data network while the network exists."""
    hosts = [*await asyncio.gather(lab.host("one"), lab.host("two"))]
    await lab.network("contivh1", subnet="192.168.20.0/24", nwType="infra")
    networks = {"a": ("17.5.4.0/22", "2001:db8:17::/64"), "b": ("13.5.7.0/24", "2001:db8:13::/64")}
    for name, (subnet, subnet_v6) in networks.items():
        await lab.network(name, subnet=subnet, ipv6Subnet=subnet_v6)
    subnets = {subnet for both in networks.values() for subnet in both}

    def routes(host: Host) -> set[str]:
        listed = (inventory.run_json(host.netns, "ip", "-j", family, "route") for family in ("-4", "-6"))
        return {route["dst"] for routes in listed for route in routes} & subnets

    for host in hosts:
        await eventually(partial(asyncio.to_thread, routes, host), lambda found: found == subnets)
    pod = await hosts[1].pod("p", network="a")
    with Namespace.open(hosts[0].netns) as namespace:
        for family, address in ((4, hosts[0].address), (6, f"fd77:6566:7400::{hosts[0].address}")):
            here = traffic.NetnsAddress(namespace, ip_address(address))
            assert await traffic.eventually_reaches(here, pod.place(family), port=80), f"v{family}"
    await pod.remove()
    for name in networks:
        await eventually(partial(lab.rest.delete, "networks", f"default:{name}"), lambda answer: answer.status == 200)
    for host in hosts:
        await eventually(partial(asyncio.to_thread, routes, host), lambda found: not found)
