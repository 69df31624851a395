"""Services asked from outside, from hosts and from other tenants, by packets (contiv 7.11)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Any

import pytest
from tests.support import inventory
from tests.support.external_hosts import (
    EXTERNAL,
    FAMILIES,
    NODE_PORT,
    OUTSIDE,
    VIPS,
    as_known_inside,
    host_address,
    host_place,
    names,
    places,
    routed,
    who_answers,
)
from tests.support.kube_feed import TARGET_PORT, KubeFeed, kube_feed
from tests.support.modes import TOWNS_ALL_IN_SOAK
from tests.support.responders import Answer, answering, ask, ask_by, is_ignored, is_refused
from tests.support.tenant_fixture import TenantFixture

from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.traffic import TCP, UDP, Place, Transport

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("underlay"), TOWNS_ALL_IN_SOAK]

STORE = "etcd"


@pytest.mark.parametrize("transport", [TCP, UDP])
@pytest.mark.parametrize("family", FAMILIES)
async def test_node_ports_lead_to_all_pods_from_every_node(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], family: int, transport: Transport
) -> None:
    """Cluster: pods of the node that was asked see the caller itself, those of other nodes see that node."""
    pods = await town.pods()
    await feed.put("web", *pods, node_port=NODE_PORT, transport=transport.name, clusterIPs=[VIPS[family]])
    async with answering(places(pods, family), port=TARGET_PORT, transport=transport):
        for near, far in itertools.permutations(pods):
            asked = host_address(near.host, family)
            found = await who_answers(world[family], asked, NODE_PORT, transport=transport)
            assert found == {
                Answer(near.name, OUTSIDE[family]),
                Answer(far.name, as_known_inside(near.host, family)),
            }


@pytest.mark.parametrize("family", FAMILIES)
async def test_external_addresses_lead_to_all_pods(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], owning: None, family: int
) -> None:
    """externalIPs and what a load balancer gave, asked by the world, by hosts and by pods."""
    near, far = await town.pods()
    other = EXTERNAL[family] + "7"
    await feed.put("web", near, far, clusterIPs=[VIPS[family]], externalIPs=[EXTERNAL[family]], ingress=[other])
    async with answering(places([near, far], family), port=TARGET_PORT):
        with ExitStack() as closing:
            callers = [world[family], host_place(near.host, closing, family), near.place(family), far.place(family)]
            for caller, address in itertools.product(callers, (EXTERNAL[family], other)):
                assert names(await who_answers(caller, address)) == {near.name, far.name}
        assert await is_refused(world[family], EXTERNAL[family], 81), "the address is nothing but its services"


@pytest.mark.parametrize("policy", ["Cluster", "Local"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_an_external_address_may_be_one_that_a_host_has(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], owning: None, family: int, policy: str
) -> None:
    """As keepalived and the like do it: the address is on an interface of the host that is to answer."""
    near, far = await town.pods()
    wanted: dict[str, Any] = {"clusterIPs": [VIPS[family]], "externalTrafficPolicy": policy}
    await feed.put("web", near, far, node_port=NODE_PORT, ingress=[EXTERNAL[family]], **wanted)
    await feed.put("more", far, externalIPs=[EXTERNAL[family] + "1"], clusterIPs=[VIPS[family] + "1"])
    addresses = [f"{EXTERNAL[family]}{end}/{32 if family == 4 else 128} dev lo" for end in ("", "1")]
    async with answering(places([near, far], family), port=TARGET_PORT):
        for address in addresses:
            inventory.run(near.host.machine, f"ip addr add {address}")
        try:
            found = await who_answers(world[family], EXTERNAL[family])
            assert Answer(near.name, OUTSIDE[family]) in found
            assert names(found) == ({near.name} if policy == "Local" else {near.name, far.name})
            assert names(await who_answers(world[family], EXTERNAL[family] + "1")) == {far.name}
        finally:
            for address in addresses:
                inventory.run(near.host.machine, f"ip addr del {address}")


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_load_balancers_address_is_asked_from_its_sources_only(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], owning: None, family: int
) -> None:
    """loadBalancerSourceRanges; node ports and cluster addresses are not concerned."""
    near, _ = await town.pods()
    other = "192.0.2.253/32" if family == 4 else "2001:db8:ffff::253/128"
    own = other.replace("253", "254")
    async with answering(places([near], family), port=TARGET_PORT):
        for ranges, passes in (([other], False), ([other, own], True), ([other], False), ([], True)):
            limits: dict[str, Any] = {"clusterIPs": [VIPS[family]], "loadBalancerSourceRanges": ranges}
            await feed.put("web", near, node_port=NODE_PORT, ingress=[EXTERNAL[family]], **limits)
            if passes:
                assert names({await ask(world[family], EXTERNAL[family], 80)}) == {near.name}
            else:
                assert await is_ignored(world[family], EXTERNAL[family], 80)
            assert names({await ask(world[family], host_address(near.host, family), NODE_PORT)}) == {near.name}


@pytest.mark.parametrize("family", FAMILIES)
async def test_local_traffic_keeps_the_callers_address_and_the_node(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], owning: None, family: int
) -> None:
    """externalTrafficPolicy Local. To pods and hosts an external address is as good as one of the cluster."""
    near, far = await town.pods()
    wanted: dict[str, Any] = {
        "clusterIPs": [VIPS[family]],
        "externalIPs": [EXTERNAL[family]],
        "externalTrafficPolicy": "Local",
    }
    await feed.put("web", near, far, node_port=NODE_PORT, **wanted)
    async with answering(places([near, far], family), port=TARGET_PORT):
        for pod in (near, far):
            found = await who_answers(world[family], host_address(pod.host, family), NODE_PORT)
            assert found == {Answer(pod.name, OUTSIDE[family])}
        assert await who_answers(world[family], EXTERNAL[family]) == {Answer(near.name, OUTSIDE[family])}
        assert names(await who_answers(near.place(family), EXTERNAL[family])) == {near.name, far.name}
        await feed.put("web", far, node_port=NODE_PORT, **wanted)
        for address, port in ((EXTERNAL[family], 80), (host_address(near.host, family), NODE_PORT)):
            assert await is_refused(world[family], address, port), "only another node has some"


@pytest.mark.parametrize("family", FAMILIES)
async def test_policy_judges_who_asks_and_not_the_host_that_was_asked(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], family: int
) -> None:
    """A pod that lets in one address only is asked at a node port by that one, and by nobody else."""
    await town.policy("closed", "-d in -p 1 -j deny", f"-d in -p 2 -i {OUTSIDE[family]} -j allow")
    await town.group("closed", "closed")
    near, far = await town.pods("closed")
    stranger = await town.pod(near.host)
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[family]], externalTrafficPolicy="Local")
    async with answering(places([near], family), port=TARGET_PORT):
        asked = host_address(near.host, family)
        assert await who_answers(world[family], asked, NODE_PORT) == {Answer(near.name, OUTSIDE[family])}
        with ExitStack() as closing:
            for caller in (host_place(far.host, closing, family), far.place(family), stranger.place(family)):
                assert await is_ignored(caller, asked, NODE_PORT)


@pytest.mark.parametrize("family", FAMILIES)
async def test_internal_local_traffic_stays_on_the_node(town: TenantFixture, feed: KubeFeed, family: int) -> None:
    near, far = await town.pods()
    await feed.put("web", near, far, clusterIPs=[VIPS[family]], internalTrafficPolicy="Local")
    async with answering(places([near, far], family), port=TARGET_PORT):
        for pod in (near, far):
            assert names(await who_answers(pod.place(family), VIPS[family])) == {pod.name}


@pytest.mark.parametrize("family", FAMILIES)
async def test_hosts_ask_cluster_addresses_and_node_ports(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], family: int
) -> None:
    """Also with nobody of the tenant on it. The world never gets to a cluster address, whatever it sends there."""
    one, two = town.lab.hosts.values()
    pod = await town.pod(two)
    await feed.put("web", pod, node_port=NODE_PORT, clusterIPs=[VIPS[family]])
    async with answering(places([pod], family), port=TARGET_PORT):
        with ExitStack() as closing:
            node_ports = [(host_address(host, family), NODE_PORT) for host in (one, two)]
            for host in (one, two):
                caller = host_place(host, closing, family)
                for address, port in ((VIPS[family], 80), *node_ports):
                    assert names(await who_answers(caller, address, port)) == {pod.name}, (host.name, address)
                loopback = Place(caller.namespace, ip_address("127.0.0.1" if family == 4 else "::1"))
                assert await is_refused(loopback, loopback.address, NODE_PORT)
        with routed(VIPS[family], host_address(two, family)):
            assert await is_ignored(world[family], VIPS[family], 80)


@pytest.mark.parametrize("family", FAMILIES)
async def test_without_backends_everybody_is_refused(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], owning: None, family: int
) -> None:
    near, _ = await town.pods()
    await feed.put("web", node_port=NODE_PORT, clusterIPs=[VIPS[family]], externalIPs=[EXTERNAL[family]])
    assert await is_refused(near.place(family), VIPS[family], 80)
    assert await is_refused(world[family], EXTERNAL[family], 80)
    assert await is_refused(world[family], host_address(near.host, family), NODE_PORT)
    with ExitStack() as closing:
        assert await is_refused(host_place(near.host, closing, family), VIPS[family], 80)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_client_stays_with_its_backend(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], family: int
) -> None:
    """sessionAffinity ClientIP, at node ports too."""
    pods = [*await town.pods(), *await town.pods()]
    await feed.put("web", *pods, node_port=NODE_PORT, clusterIPs=[VIPS[family]], sessionAffinity="ClientIP")
    async with answering(places(pods, family), port=TARGET_PORT):
        for caller, address, port in (
            (pods[0].place(family), VIPS[family], 80),
            (world[family], host_address(pods[0].host, family), NODE_PORT),
        ):
            assert len(names(await who_answers(caller, address, port))) == 1


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_pod_reaches_itself_through_its_service(
    town: TenantFixture, feed: KubeFeed, owning: None, family: int
) -> None:
    """Hairpin: by all addresses of the service, and by node ports of its own and of another host."""
    near, far = await town.pods()
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[family]], externalIPs=[EXTERNAL[family]])
    async with answering(places([near], family), port=TARGET_PORT):
        for caller in (near, far):
            for address, port in (
                (VIPS[family], 80),
                (EXTERNAL[family], 80),
                (host_address(near.host, family), NODE_PORT),
                (host_address(far.host, family), NODE_PORT),
            ):
                assert names({await ask(caller.place(family), address, port)}) == {near.name}, (caller.name, address)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_shared_service_is_reached_by_every_tenant(
    town: TenantFixture, feed: KubeFeed, found: Callable[[], TenantFixture], family: int
) -> None:
    """Though both have the same addresses. A service that is not shared is reached by nobody else."""
    pods = await town.pods()
    neighbours = found()
    await neighbours.build()
    others = await neighbours.pods()
    await feed.put("dns", *pods, clusterIPs=[VIPS[family]], shared=True)
    async with answering(places(pods, family), port=TARGET_PORT):
        for caller in (*pods, *others):
            assert names(await who_answers(caller.place(family), VIPS[family])) == {pod.name for pod in pods}
        await feed.put("dns", *pods, clusterIPs=[VIPS[family]])
        for caller in others:
            assert await is_ignored(caller.place(family), VIPS[family], 80)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_host_may_answer_for_a_service(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], found: Callable[[], TenantFixture], family: int
) -> None:
    """As the API server does: for pods of all tenants, for hosts, and at node ports; near and far."""
    near, far = await town.pods()
    neighbours = found()
    await neighbours.build()
    others = await neighbours.pods()
    address = host_address(near.host, family)
    await feed.put("kubernetes", addresses=[address], node_port=NODE_PORT, clusterIPs=[VIPS[family]], shared=True)
    with ExitStack() as closing:
        server = host_place(near.host, closing, family)
        async with answering({"api": server}, port=TARGET_PORT):
            callers = [pod.place(family) for pod in (near, far, *others)]
            callers += [host_place(pod.host, closing, family) for pod in (near, far)]
            for caller in callers:
                assert names({await ask(caller, VIPS[family], 80)}) == {"api"}
            for pod in (near, far):
                assert names({await ask(world[family], host_address(pod.host, family), NODE_PORT)}) == {"api"}


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_datagram_never_goes_to_a_backend_that_is_gone(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], family: int
) -> None:
    """A client that keeps its port, as resolvers do, is served by the next backend, and before there was one too."""
    near, far = await town.pods()
    wanted: dict[str, Any] = {"transport": "UDP", "node_port": NODE_PORT, "clusterIPs": [VIPS[family]]}
    loop = asyncio.get_running_loop()
    async with answering(places([near, far], family), port=TARGET_PORT, transport=UDP):
        with world[family].open_caller(UDP) as caller, near.place(family).open_caller(UDP) as inner:
            doors = ((caller, host_address(near.host, family), NODE_PORT), (inner, VIPS[family], 80))
            for mouth, address, port in doors:
                await loop.sock_sendto(mouth, b"early", (address, port))
            for pod in (near, far, near):
                await feed.put("dns", pod, **wanted)
                for mouth, address, port in doors:
                    answer = await ask_by(mouth, address, port, transport=UDP)
                    assert answer.who == pod.name


async def test_node_ports_survive_the_agent(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], owning: None
) -> None:
    """While it is away, and after it has come back; and no document, no opening."""
    near, far = await town.pods()
    host = near.host
    await feed.put("web", near, far, node_port=NODE_PORT, clusterIPs=[VIPS[4]], externalIPs=[EXTERNAL[4]])
    async with answering(places([near, far], 4), port=TARGET_PORT):
        host.kill()
        for _ in range(2):
            for address, port in ((host.address, NODE_PORT), (EXTERNAL[4], 80)):
                assert names(await who_answers(world[4], address, port)) == {near.name, far.name}
            await host.start()
        await feed.remove("web")
        assert await is_refused(world[4], host.address, NODE_PORT)
        assert await is_ignored(world[4], EXTERNAL[4], 80)


async def test_nothing_is_left_where_only_services_were(lab: NetLab, found: Callable[[], TenantFixture]) -> None:
    """A tenant without workloads comes to every node with its first node port, and leaves with its last."""
    town = found()
    await town.build()
    before = [openings(host) for host in lab.hosts.values()]
    async with kube_feed(lab, town.tenant) as feed:
        await feed.put("web", node_port=NODE_PORT, clusterIPs=[VIPS[4]])
        assert all(town.tenant in host.tenants.names() for host in lab.hosts.values())
    for host, state in zip(lab.hosts.values(), before, strict=True):
        assert openings(host) == state
        assert town.tenant not in host.tenants.names()


def openings(host: Host) -> tuple[set[str], list[str], object]:
    """Devices, routes and what the maps of the host's table hold."""
    routes = [
        str(route["dst"])
        for family in ("-4", "-6")
        for route in inventory.ask(host.machine, "ip", "-j", family, "route")
    ]
    ruleset = inventory.ask(host.machine, "nft", "-j", "list", "ruleset")["nftables"]
    elements = {each["map"]["name"]: each["map"].get("elem") for each in ruleset if "map" in each}
    return inventory.devices(host.machine), sorted(routes), elements
