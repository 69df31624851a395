"""Services asked from outside, from hosts and from other tenants, by packets (issue 6; facts 7.11; anchors 5b)."""

from __future__ import annotations

import asyncio
import itertools
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from weft.adapters.linux.netns import Namespace
from weft.domain.cluster import Cluster
from weft.domain.hosting.doors import doors
from weft.domain.ids import StoreKey, TenantName
from weft.drivers import EtcdStoreSettings, open_store
from weft.testing import inventory
from weft.testing.answering import Answer, answering, ask, ask_by, is_ignored, is_refused
from weft.testing.hosts import Host, Pod
from weft.testing.kube_feed import TARGET_PORT, KubeFeed, kube_feed
from weft.testing.netlab import NetLab
from weft.testing.towns import WAIT, Town
from weft.testing.traffic import QUIET_S, TCP, UDP, Place, Transport
from weft.testing.waiting import DEADLINE

pytestmark = pytest.mark.asyncio(loop_scope="module")

STORE = "etcd"
FAMILIES = (4, 6)
NODE_PORT = 30080
OUTSIDE = {4: "192.0.2.254", 6: "2001:db8:ffff::254"}
RANGES = {4: "198.51.100.0/24", 6: "2001:db8:eeee::/64"}
EXTERNAL = {4: "198.51.100.7", 6: "2001:db8:eeee::7"}
VIPS = {4: "10.96.0.10", 6: "fd00:96::10"}


@pytest.fixture(scope="module", autouse=True)
def underlay(lab: NetLab) -> None:
    """An underlay of both families: hosts and the lab itself, which is the outside."""
    subprocess.run(["ip", "addr", "add", f"{OUTSIDE[6]}/64", "dev", "underlay", "nodad"], check=True, timeout=DEADLINE)
    for number, host in enumerate(lab.hosts.values(), start=1):
        inventory.run(host.machine, f"ip addr add 2001:db8:ffff::{number}/64 dev eth0 nodad")
    first = {4: "192.0.2.1", 6: "2001:db8:ffff::1"}
    for family, ranges in RANGES.items():
        subprocess.run(["ip", "route", "add", ranges, "via", first[family]], check=True, timeout=DEADLINE)


@pytest_asyncio.fixture(loop_scope="module")
async def feed(lab: NetLab, town: Town) -> AsyncIterator[KubeFeed]:
    async with kube_feed(lab, town.tenant) as feed:
        yield feed


@pytest_asyncio.fixture(loop_scope="module")
async def owning(town: Town) -> AsyncIterator[None]:
    """The tenant has the external ranges while the test runs."""
    await town.netctl(f"tenant create {town.tenant} {' '.join(f'--external-range {each}' for each in RANGES.values())}")
    yield
    await town.netctl(f"tenant create {town.tenant}")


@pytest.fixture
def world(apart: None) -> Iterator[dict[int, Place]]:
    """The outside, by family."""
    with ExitStack() as closing:
        namespace = closing.enter_context(Namespace.current())
        yield {family: Place(namespace, ip_address(text)) for family, text in OUTSIDE.items()}


def host_address(host: Host, family: int) -> str:
    return host.address if family == 4 else f"2001:db8:ffff::{host.address.rpartition('.')[2]}"


def host_place(host: Host, closing: ExitStack, family: int) -> Place:
    """The host itself, as one who asks."""
    namespace = closing.enter_context(Namespace.open(host.machine))
    return Place(namespace, ip_address(host_address(host, family)))


def as_known_inside(host: Host, family: int) -> str:
    """As whom workloads of other nodes know a host."""
    return host.address if family == 4 else str(ip_address(f"fd77:6566:7400::{host.address}"))


def places(pods: list[Pod], family: int) -> dict[str, Place]:
    return {pod.name: pod.place(family) for pod in pods}


async def who_answers(source: Place, address: object, port: int = 80, *, transport: Transport = TCP) -> set[Answer]:
    """Everybody who does, when asked so often that nobody is left out but by a miracle."""
    return {await ask(source, address, port, transport=transport) for _ in range(24)}


def names(answers: set[Answer]) -> set[str]:
    return {answer.who for answer in answers}


@pytest.mark.parametrize("transport", [TCP, UDP])
@pytest.mark.parametrize("family", FAMILIES)
async def test_node_ports_lead_to_all_pods_from_every_node(
    town: Town, feed: KubeFeed, world: dict[int, Place], family: int, transport: Transport
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
    town: Town, feed: KubeFeed, world: dict[int, Place], owning: None, family: int
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


async def test_cve_2020_8554_an_external_address_that_is_not_the_tenants_is_not_served(
    town: Town, feed: KubeFeed, world: dict[int, Place]
) -> None:
    """CVE-2026-32254, CVE-2022-28224 too: nobody has ranges unless an operator gives them, and the log says so."""
    near, _ = await town.pods()
    addresses = [EXTERNAL[4], near.host.address, str(near.address())]
    await feed.put("web", near, clusterIPs=[VIPS[4]], externalIPs=addresses)
    async with answering(places([near], 4), port=TARGET_PORT):
        assert await is_ignored(world[4], EXTERNAL[4], 80)
        log = (near.host.home / "netplugin.log").read_text()
        assert f"external address {EXTERNAL[4]} is not in externalRanges of the tenant" in log
        await town.netctl(f"tenant create {town.tenant} --external-range 0.0.0.0/0 {WAIT}")
        try:
            assert names(await who_answers(world[4], EXTERNAL[4])) == {near.name}
            assert await is_refused(world[4], near.host.address, 80), "an address of a node stays the node's"
        finally:
            await town.netctl(f"tenant create {town.tenant} {WAIT}")
        assert await is_ignored(world[4], EXTERNAL[4], 80)


@pytest.mark.parametrize("family", FAMILIES)
async def test_local_traffic_keeps_the_callers_address_and_the_node(
    town: Town, feed: KubeFeed, world: dict[int, Place], owning: None, family: int
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
async def test_internal_local_traffic_stays_on_the_node(town: Town, feed: KubeFeed, family: int) -> None:
    near, far = await town.pods()
    await feed.put("web", near, far, clusterIPs=[VIPS[family]], internalTrafficPolicy="Local")
    async with answering(places([near, far], family), port=TARGET_PORT):
        for pod in (near, far):
            assert names(await who_answers(pod.place(family), VIPS[family])) == {pod.name}


@pytest.mark.parametrize("family", FAMILIES)
async def test_hosts_ask_cluster_addresses_and_node_ports(
    town: Town, feed: KubeFeed, world: dict[int, Place], family: int
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


@contextmanager
def routed(target: str, hop: str) -> Iterator[None]:
    """The outside sends packets for an address to a host."""
    subprocess.run(["ip", "route", "add", target, "via", hop], check=True, timeout=DEADLINE)
    try:
        yield
    finally:
        subprocess.run(["ip", "route", "del", target, "via", hop], check=True, timeout=DEADLINE)


@pytest.mark.parametrize("family", FAMILIES)
async def test_without_backends_everybody_is_refused(
    town: Town, feed: KubeFeed, world: dict[int, Place], owning: None, family: int
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
    town: Town, feed: KubeFeed, world: dict[int, Place], family: int
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
async def test_a_pod_reaches_itself_through_its_service(town: Town, feed: KubeFeed, owning: None, family: int) -> None:
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
    town: Town, feed: KubeFeed, found: Callable[[], Town], family: int
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
    town: Town, feed: KubeFeed, world: dict[int, Place], found: Callable[[], Town], family: int
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
    town: Town, feed: KubeFeed, world: dict[int, Place], family: int
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


async def test_node_ports_survive_the_agent(town: Town, feed: KubeFeed, world: dict[int, Place], owning: None) -> None:
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


async def test_nothing_is_left_where_only_services_were(lab: NetLab, found: Callable[[], Town]) -> None:
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


@pytest.mark.parametrize("number", [NODE_PORT, 9090])
async def test_cve_2020_8558_loopback_of_a_node_is_not_for_its_neighbours(
    town: Town, feed: KubeFeed, world: dict[int, Place], number: int
) -> None:
    """CVE-2021-25736 too: whatever is served there, no packet for 127.0.0.1, or from it, comes in from outside."""
    near, _ = await town.pods()
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[4]])
    with ExitStack() as closing:
        loopback = Place(closing.enter_context(Namespace.open(near.host.machine)), ip_address("127.0.0.1"))
        ears = [
            closing.enter_context(place.listening(port, UDP))
            for place, port in ((loopback, number), (near.place(), TARGET_PORT))
        ]
        send_raw(near.host, datagram("192.0.2.254", "127.0.0.1", number))
        send_raw(near.host, datagram("127.0.0.1", near.host.address, number))
        await asyncio.sleep(QUIET_S)
        for ear in ears:
            with pytest.raises(BlockingIOError):
                ear.recv(64)
        assert settings_of(near.host) == {"0"}


def settings_of(host: Host) -> set[str]:
    """What route_localnet is set to, of all devices."""
    with Namespace.open(host.machine) as machine:
        return machine.run(
            lambda: {path.read_text().strip() for path in Path("/proc/sys/net/ipv4/conf").glob("*/route_localnet")}
        )


def datagram(source: str, target: str, port: int) -> bytes:
    """A packet of IPv4 with UDP in it; its checksums are left to nobody's care."""
    content = struct.pack("!HHHH", 40000, port, 9, 0) + b"?"
    header = struct.pack(
        "!BBHHHBBH4s4s",
        0x45,
        0,
        20 + len(content),
        1,
        0,
        64,
        17,
        0,
        ip_address(source).packed,
        ip_address(target).packed,
    )
    total = sum(struct.unpack("!10H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return header[:10] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + header[12:] + content


def send_raw(host: Host, packet: bytes) -> None:
    """Put a packet on the underlay for a host, which no kernel would send."""
    mac = inventory.ask(host.machine, "ip", "-j", "link", "show", "eth0")[0]["address"]
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as wire:
        wire.sendto(packet, ("underlay", 0x0800, 0, 0, bytes.fromhex(mac.replace(":", ""))))


async def test_cve_2019_9946_openings_catch_nothing_that_only_passes_by(
    town: Town, feed: KubeFeed, world: dict[int, Place], owning: None
) -> None:
    """CVE-2025-67499 too. Private addresses of a tenant, which its link leads to, are not for the world either."""
    near, far = await town.pods()
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[4]], externalIPs=[EXTERNAL[4]])
    one, two = near.host, far.host
    door = str(doors(await cluster_of(town.lab))[TenantName(town.tenant)][0])
    async with answering(places([near], 4), port=TARGET_PORT):
        assert names({await ask(world[4], one.address, NODE_PORT)}) == {near.name}
        with routed("198.18.0.1", one.address), routed(door, one.address), routed(str(near.address()), one.address):
            for address, port in (("198.18.0.1", NODE_PORT), (door, NODE_PORT), (str(near.address()), TARGET_PORT)):
                assert await is_ignored(world[4], address, port)
        with ExitStack() as closing:
            async with answering({"other": host_place(two, closing, 4)}, port=NODE_PORT + 1):
                assert names({await ask(near.place(), two.address, NODE_PORT + 1)}) == {"other"}


async def cluster_of(lab: NetLab) -> Cluster:
    """The lab's cluster as it is stored."""
    cluster = Cluster()
    assert lab.etcd is not None
    async with open_store(EtcdStoreSettings(endpoints=lab.etcd.endpoints)) as store:
        cluster.replace(await store.list(StoreKey("")))
    return cluster
