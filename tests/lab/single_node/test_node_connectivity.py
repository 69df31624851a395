"""Connectivity of pods within a tenant, on one host and across hosts, and tenant isolation (contiv 10.2, 10.3)."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.modes import ALL_IN_SOAK, BRIDGE_IN_SOAK, ON_OVS_TOO, OVS_MODES_IN_SOAK
from tests.support.switch_inventory import BRIDGE

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab, open_lab
from weft.lab.servers.masters import API
from weft.lab.traffic import TCP, UDP, Transport
from weft.lab.waiting import eventually, until


async def two_hosts_with_pods(lab: NetLab, *names: str, **choices: str) -> list[Pod]:
    """Create pods, alternating between two hosts."""
    hosts = await asyncio.gather(lab.host("one"), lab.host("two"))
    turns = itertools.cycle(hosts)
    return list(await asyncio.gather(*(host.pod(name, **choices) for name, host in zip(names, turns, strict=False))))


@ON_OVS_TOO
@BRIDGE_IN_SOAK
async def test_pods_of_a_network_reach_each_other_after_repeated_restarts(lab: NetLab) -> None:
    """B1, B3: all pairs, deleted and recreated; no address leaks."""
    await lab.network("wide", subnet="10.1.0.0/16", pktTag=1001)
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    for _ in range(3):
        pods = await asyncio.gather(
            *(host.pod(f"{host.name}-{number}", network="wide") for host in (one, two) for number in range(2))
        )
        assert len({pod.address() for pod in pods}) == 4
        answers = await asyncio.gather(
            *(
                a.eventually_reaches(b, port=1000 + index)
                for index, (a, b) in enumerate(itertools.permutations(pods, 2))
            )
        )
        assert all(answers)
        await inventory.wait_consistent(lab)
        await asyncio.gather(*(pod.remove() for pod in pods))
    assert inventory.stored(await lab.rest.state()) == set()


@pytest.mark.parametrize("transport", [TCP, UDP])
@pytest.mark.parametrize("store", ["embedded", "etcd"])
async def test_both_families_on_every_store(isolated: None, store: str, transport: Transport) -> None:
    """N4 (routing mode): dual stack with gateways, on one host and across."""
    async with open_lab(store=store) as lab:
        await lab.network(
            "dual",
            subnet="10.1.0.0/16",
            gateway="10.1.255.254",
            ipv6Subnet="2001:db8:1::/64",
            ipv6Gateway="2001:db8:1::1",
        )
        a, b, c = await two_hosts_with_pods(lab, "a", "b", "c", network="dual")
        for family in (4, 6):
            for pod in (b, c):
                assert await a.eventually_reaches(pod, family=family, transport=transport)
                assert await pod.eventually_reaches(a, family=family, transport=transport)


async def test_the_python_shim_attaches_like_the_c_shim(isolated: None) -> None:
    async with open_lab(shim="python") as lab:
        a, b = await two_hosts_with_pods(lab, "a", "b")
        assert await a.eventually_reaches(b)
        await a.check()
        await a.remove()


@ON_OVS_TOO
async def test_networks_of_a_tenant_are_routed_to_each_other(lab: NetLab) -> None:
    """N2, N3: in routing mode pods of one tenant reach each other within and between networks."""
    for number in range(3):
        await lab.network(
            f"net-{number}",
            subnet=f"10.{number}.0.0/24",
            gateway=f"10.{number}.0.254",
            ipv6Subnet=f"2001:db8:{number}::/64",
        )
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    pods = [
        await host.pod(f"{host.name}-{number}", network=f"net-{number}") for host in (one, two) for number in range(3)
    ]
    for index, (a, b) in enumerate(itertools.permutations(pods, 2)):
        for family in (4, 6):
            assert await a.eventually_reaches(b, port=1000 + index, family=family), (
                f"{a.name} does not reach {b.name}, v{family}"
            )


@ON_OVS_TOO
@BRIDGE_IN_SOAK
@pytest.mark.parametrize("subnet", ["10.5.0.0/16", "10.5.0.0/24"])
async def test_a_network_without_gateway_has_a_default_route(lab: NetLab, subnet: str) -> None:
    """N5, W35: a default route for both families, and full connectivity."""
    await lab.network("bare", subnet=subnet, ipv6Subnet="2001:db8:5::/64")
    a, b, c = await two_hosts_with_pods(lab, "a", "b", "c", network="bare")
    for family in (4, 6):
        assert await a.eventually_reaches(b, family=family)
        assert await a.eventually_reaches(c, family=family)
        (default,) = [
            route
            for route in inventory.run_json(a.netns, "ip", "-j", f"-{family}", "route")
            if route["dst"] == "default"
        ]
        assert default["dev"] == "eth0"


@ON_OVS_TOO
@BRIDGE_IN_SOAK
async def test_tenants_with_overlapping_subnets_are_isolated(lab: NetLab) -> None:
    """N6: equal subnets, pods created concurrently; each reaches pods of its own tenant only."""
    for tenant in ("blue", "red"):
        await lab.tenant(tenant)
        await lab.network(
            "net", tenant=tenant, subnet="10.9.0.0/24", gateway="10.9.0.254", ipv6Subnet="2001:db8:9::/64"
        )
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    b1, b2, r1, r2 = await asyncio.gather(
        *(
            host.pod(f"{tenant}-{host.name}", tenant=tenant, network="net")
            for tenant in ("blue", "red")
            for host in (one, two)
        )
    )
    assert {b1.address(), b2.address()} == {r1.address(), r2.address()}
    for family in (4, 6):
        assert await b1.eventually_reaches(b2, family=family)
        assert await r1.eventually_reaches(r2, family=family)
    tries = [
        (a, b, transport, family)
        for blue, red in itertools.product((b1, b2), (r1, r2))
        for a, b in ((blue, red), (red, blue))
        for transport in (TCP, UDP)
        for family in (4, 6)
    ]
    silence = await asyncio.gather(
        *(
            a.never_reaches(b, port=2000 + index, transport=transport, family=family)
            for index, (a, b, transport, family) in enumerate(tries)
        )
    )
    assert all(silence)


@OVS_MODES_IN_SOAK
@BRIDGE_IN_SOAK
async def test_networks_and_tenants_leave_nothing_behind(lab: NetLab) -> None:
    """N7: created and deleted repeatedly; no store key, namespace or device is left."""
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    keys = set(await lab.rest.state())
    for _ in range(2):
        await lab.tenant("blue")
        await lab.network("net", tenant="blue", subnet="10.3.0.0/16", gateway="10.3.0.1")
        pods = [await host.pod(f"pod-{host.name}", tenant="blue", network="net") for host in (one, two)]
        assert await pods[0].eventually_reaches(pods[1])
        for pod in pods:
            await pod.remove()
        await eventually(lambda: lab.rest.delete("networks", "blue:net"), lambda answer: answer.status == 200)
        (await lab.rest.delete("tenants", "blue")).accepted()
        await until(lambda: not one.tenants.names() | two.tenants.names())
        left = set(await lab.rest.state()) - keys
        assert {key for key in left if not key.startswith(("alive/", "leader"))} == set()


@ON_OVS_TOO
@BRIDGE_IN_SOAK
async def test_a_deleted_network_with_remote_pods_only_leaves_nothing(lab: NetLab) -> None:
    """N10: no route, neighbour, rule or flow is left on a host that had none of its pods."""
    await lab.network("kept", subnet="10.3.0.0/24", ipv6Subnet="2001:db8:3::/64")
    one, two = await asyncio.gather(lab.host("one"), lab.host("two"))
    witness, near = await one.pod("witness", network="kept"), await two.pod("near", network="kept")
    assert await witness.eventually_reaches(near)
    before = datapath_entries(one)
    await lab.network("deleted", subnet="10.4.0.0/24", ipv6Subnet="2001:db8:4::/64")
    far = await two.pod("far", network="deleted")
    if lab.fwdmode == "routing":
        for family in (4, 6):
            assert await witness.eventually_reaches(far, family=family)
        assert datapath_entries(one) != before
    await far.remove()
    deleted = partial(lab.rest.delete, "networks", "default:deleted")
    await eventually(deleted, lambda answer: answer.status == 200)
    await eventually(lambda: asyncio.to_thread(datapath_entries, one), before.__eq__)


def datapath_entries(host: Host) -> set[str]:
    """Routes, neighbours, FDB entries, rules and flows of a host's only tenant."""
    flows = host.switch.dump_flows(BRIDGE) if host.switch is not None else []
    return {*flows, *netns_entries(host.tenants.path / "default")}


def netns_entries(netns: Path) -> set[str]:
    """The same in one namespace."""
    found = {
        f"{command} {each.get('dst')} {each.get('dev')} {each.get('lladdr', each.get('mac'))}"
        for command in ("ip -j -4 route", "ip -j -6 route", "ip -j -4 neigh", "ip -j -6 neigh", "bridge -j fdb")
        for each in inventory.run_json(netns, *command.split())
    }
    for each in inventory.run_json(netns, "nft", "-j", "list", "ruleset")["nftables"]:
        for kind in ("set", "map"):
            if kind in each:
                found |= {f"{each[kind]['name']} {element}" for element in each[kind].get("elem", ())}
    return found


@ALL_IN_SOAK
async def test_neighbour_entries_are_permanent_without_an_agent_w40(lab: NetLab) -> None:
    """W40: neighbour entries are permanent, so the first packet needs no ARP or neighbour discovery."""
    await lab.network(
        "net", subnet="10.1.0.0/16", gateway="10.1.0.1", ipv6Subnet="2001:db8:1::/64", ipv6Gateway="2001:db8:1::1"
    )
    pods = await two_hosts_with_pods(lab, "a", "b", "c", network="net")
    await inventory.wait_consistent(lab)  # in bridge mode each node must have every neighbour entry first
    (await lab.rest.send("POST", f"{API}/sync?wait=30")).accepted()
    for host in lab.hosts.values():
        host.kill()
    for pod in pods:
        known = inventory.run_json(pod.netns, "ip", "-j", "neigh", "show", "nud", "permanent")
        assert {each["dst"] for each in known} >= {"10.1.0.1", "2001:db8:1::1"}
    for index, (a, b) in enumerate(itertools.permutations(pods, 2)):
        for family in (4, 6):
            assert await a.reaches(b, port=1000 + index, family=family), f"{a.name} does not reach {b.name}, v{family}"
