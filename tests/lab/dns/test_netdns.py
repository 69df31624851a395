"""netdns in real tenant netns, queried by a real client (contiv 7.14; B4, R4, R10, W40)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import dns.message
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, network
from tests.support.fake_cluster import group as member_group
from tests.support.netdns import GATEWAYS, POD, POD_V6, Netdns, Pod
from tests.support.resolver import Resolver

from weft.agent.dns_publisher import ZonePusher
from weft.domain.addresses import parse_address
from weft.domain.dns.cluster_names import Backend, ServicePort, external_service_entry, headless_service_entry
from weft.domain.dns.names import Entry, Rank, Record, Zone, address_records, forward_and_reverse_records
from weft.domain.ids import StoreKey, TenantName
from weft.domain.store_types import Change, Event
from weft.kernel.netns import NamespaceDirectory
from weft.lab.servers.processes import DEADLINE
from weft.lab.waiting import eventually
from weft.runtime.dns_control import Entries, FullSync, StatusQuery, Tenant, connect_netdns
from weft.runtime.tasks import background

if TYPE_CHECKING:
    from tests.lab.conftest import MakeNetns
    from tests.lab.dns.conftest import MakePod

BLUE, RED = TenantName("blue"), TenantName("red")
SUBNETS = ("10.1.0.0/16", "10.2.0.0/16", "fd00:1::/64")


def container(name: str, *addresses: str) -> Entry:
    return Entry(
        forward_and_reverse_records(
            name, tuple(parse_address(each, field="test") for each in addresses), rank=Rank.WORKLOAD
        )
    )


def group(name: str, count: int) -> Entry:
    members = (parse_address(f"10.1.3.{number}", field="test") for number in range(count))
    return Entry(tuple(address_records(name, members, rank=Rank.GROUP)))


def zone(**entries: Entry) -> Zone:
    return Zone(entries, SUBNETS)


WEB1 = container("web1", "10.1.0.7", "fd00:1::7")


@pytest.fixture
def pod(make_pod: MakePod) -> Pod:
    """A pod of the tenant blue."""
    return make_pod(BLUE)


@pytest.mark.parametrize("server", GATEWAYS)
@pytest.mark.parametrize("transport", ["+notcp", "+tcp"])
async def test_containers_groups_and_addresses_resolve_b4_r4(
    netdns: Netdns, pod: Pod, server: str, transport: str
) -> None:
    """On every gateway of the tenant, v4 and v6, UDP and TCP; answers come from the address that was queried."""
    await netdns.send(FullSync({BLUE: zone(web1=WEB1, group=group("svc1", 25))}))
    assert await pod.dig(transport, "WEB1", "A", server=server) == ["10.1.0.7"]
    assert await pod.dig(transport, "web1", "AAAA", server=server) == ["fd00:1::7"]
    assert await pod.dig(transport, "-x", "10.1.0.7", server=server) == ["web1."]
    assert await pod.dig(transport, "-x", "fd00:1::7", server=server) == ["web1."]
    assert len(await pod.dig(transport, "svc1", server=server)) == 10
    assert "status: NXDOMAIN" in await pod.dig_in_full(transport, "absent", server=server)
    assert "status: REFUSED" in await pod.dig_in_full(transport, "web1", "ANY", server=server)


async def test_the_c_librarys_resolver_works(netdns: Netdns, pod: Pod, tmp_path: Path) -> None:
    """The C library's resolver, as in containers: `getaddrinfo` with our gateway in resolv.conf."""
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    (tmp_path / "pods-resolv.conf").write_text(f"nameserver {GATEWAYS[0]}\n")
    mount = f"mount --bind {tmp_path}/pods-resolv.conf /etc/resolv.conf && exec getent ahosts web1"
    command = ["unshare", "--mount", "sh", "-c", mount]
    done = await asyncio.to_thread(
        pod.namespace.run,
        lambda: subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False),
    )
    assert {line.split()[0] for line in done.stdout.splitlines()} == {"10.1.0.7", "fd00:1::7"}, done.stderr


async def test_a_headless_service_is_complete_over_tcp(netdns: Netdns, pod: Pod) -> None:
    backends = [Backend(parse_address(f"10.1.4.{number}", field="test")) for number in range(150)]
    ports = [ServicePort("http", "TCP", 80)]
    entry = headless_service_entry("ns", "db", backends=backends, ports=ports, domain="cluster.local")
    await netdns.send(FullSync({BLUE: zone(db=entry)}))
    cut = await pod.dig_in_full("+ignore", "db.ns.svc.cluster.local")
    assert " tc " in next(line for line in cut.splitlines() if "flags:" in line)
    assert len(await pod.dig("db.ns.svc.cluster.local")) == 150, "dig falls back to TCP"
    assert len(await pod.dig("+tcp", "_http._tcp.db.ns.svc.cluster.local", "SRV")) == 150


async def test_tenants_with_the_same_names_and_addresses_are_isolated(netdns: Netdns, make_pod: MakePod) -> None:
    blue, red = make_pod(BLUE), make_pod(RED)
    await netdns.send(
        FullSync({BLUE: zone(a=container("web", "10.1.0.7")), RED: zone(a=container("web", "10.1.0.8"), b=WEB1)})
    )
    assert await blue.dig("web") == ["10.1.0.7"]
    assert await red.dig("web") == ["10.1.0.8"]
    assert await blue.dig("web1") == []


async def test_a_push_is_in_force_when_it_is_acknowledged(netdns: Netdns, pod: Pod) -> None:
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    await netdns.send(Tenant(BLUE, zone(web2=container("web2", "10.1.0.8"))))
    assert await pod.dig("web2") == ["10.1.0.8"]
    assert await pod.dig("web1") == []


async def test_other_names_are_forwarded_and_internal_ones_never_r10(netdns: Netdns, pod: Pod) -> None:
    netdns.resolv_conf.write_text("nameserver 127.0.0.1\n")
    alias = external_service_entry("ns", "out", target="www.example.org", domain="cluster.local")
    await netdns.send(FullSync({BLUE: zone(web1=WEB1, alias=alias)}))
    loop = asyncio.get_running_loop()
    transport, upstream = await loop.create_datagram_endpoint(Resolver, local_addr=("127.0.0.1", 53))
    for server in GATEWAYS:
        assert await pod.dig("www.example.org", server=server) == ["192.0.2.99"]
        assert await pod.dig("out.ns.svc.cluster.local", server=server) == ["192.0.2.99", "www.example.org."]
    for name in ("web2", "web1", "x.svc.cluster.local", "7.0.1.10.in-addr.arpa"):
        await pod.dig(name, "TXT")
    assert set(upstream.queries) == {"www.example.org."}
    transport.close()
    assert "status: SERVFAIL" in await pod.dig_in_full("www.example.org"), "netdns answers before dig times out"


async def test_a_pod_with_denied_dns_egress_gets_refused(netdns: Netdns, pod: Pod) -> None:
    """CVE-2024-29018: an internal network leaked DNS queries upstream."""
    netdns.resolv_conf.write_text("nameserver 127.0.0.1\n")
    loop = asyncio.get_running_loop()
    transport, upstream = await loop.create_datagram_endpoint(Resolver, local_addr=("127.0.0.1", 53))
    await netdns.send(FullSync({BLUE: zone(web1=WEB1, pod=Entry((), (POD, POD_V6), (POD, POD_V6)))}))
    for server in GATEWAYS:
        for transport_flag in ("+notcp", "+tcp"):
            answer = await pod.dig_in_full(transport_flag, "secret.example.org", server=server)
            assert "status: REFUSED" in answer
    assert await pod.dig("web1") == ["10.1.0.7"]
    assert upstream.queries == []
    transport.close()


async def test_M5_one_pod_that_floods_takes_outside_names_from_no_other(
    netdns: Netdns, pod: Pod, make_netns: MakeNetns, tmp_path: Path
) -> None:
    """UDP with slow names and silent TCP connections from one pod; another pod of the tenant still gets its answers."""
    netdns.resolv_conf.write_text("nameserver 127.0.0.1\n")
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    pods = NamespaceDirectory(tmp_path / "others")
    pods.prepare()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(
        lambda: Resolver(slow="slow.test."), local_addr=("127.0.0.1", 53)
    )
    with pods.create("other") as namespace, ExitStack() as held:
        other = Pod(namespace, tenant=make_netns(BLUE).namespace, number=6)
        for _ in range(200):
            silent = held.enter_context(pod.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM))
            await asyncio.to_thread(silent.connect, (GATEWAYS[0], 53))
        loud = held.enter_context(pod.namespace.open_socket(socket.AF_INET, socket.SOCK_DGRAM))
        for number in range(1000):
            loud.sendto(dns.message.make_query(f"n{number}.slow.test", "A").to_wire(), (GATEWAYS[0], 53))
            if number % 100 == 99:
                assert await other.dig(f"www{number}.example.org") == ["192.0.2.99"]
                assert await other.dig("+tcp", "web1") == ["10.1.0.7"]
    transport.close()
    statistics = (await netdns.send(StatusQuery())).statistics
    assert statistics["limited"] > 0
    assert statistics["connections_limited"] > 0


async def test_H5_a_bad_record_or_a_damaged_zone_cache_costs_no_other_name(netdns: Netdns, pod: Pod) -> None:
    bad = Entry((Record("x" * 64, "A", "10.1.0.9", Rank.CLUSTER), Record("fine", "A", "10.1.0.9", Rank.CLUSTER)))
    report = await netdns.send(FullSync({BLUE: zone(web1=WEB1, bad=bad)}))
    assert (report.error, report.rejected) == ("", 1)
    assert await pod.dig("web1") == ["10.1.0.7"]
    assert await pod.dig("fine") == ["10.1.0.9"]
    netdns.kill()
    cache = netdns.socket.parent / "zones"
    cache.write_bytes(cache.read_bytes() + b"\0\0\0\4\xff\xff\xff\xff" * 9)
    await netdns.start()
    assert await pod.dig("web1") == ["10.1.0.7"]


async def test_a_forwarding_loop_ends(netdns: Netdns, pod: Pod, make_netns: MakeNetns) -> None:
    """The machine's resolver forwards to netdns, which forwards to the machine's resolver."""
    netdns.resolv_conf.write_text("nameserver 127.0.0.1\n")
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    tenant = make_netns(BLUE).namespace
    seen: list[bytes] = []

    def relay() -> None:
        """The machine's resolver forwards every query to the tenant's gateway."""
        while (data := machine.recv(4096)) != b"stop":
            seen.append(data)
            back.sendto(data, (GATEWAYS[0], 53))

    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as machine,
        tenant.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as back,
    ):
        machine.bind(("127.0.0.1", 53))
        machine.settimeout(DEADLINE)
        relaying = asyncio.create_task(asyncio.to_thread(relay))
        assert "status: SERVFAIL" in await pod.dig_in_full("www.example.org")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stop:
            stop.sendto(b"stop", ("127.0.0.1", 53))
        await relaying
    assert len(seen) == 1
    assert await pod.dig("web1") == ["10.1.0.7"]


async def test_dns_does_not_depend_on_a_live_agent_w40(netdns: Netdns, pod: Pod) -> None:
    """Agents connect, push a full sync and disconnect; every query in the meantime is answered at the first try."""
    everything = FullSync({BLUE: zone(web1=WEB1, group=group("svc1", 25))})
    await netdns.send(everything)

    async def restart_agents() -> None:
        for _ in range(50):
            await netdns.send(everything)

    restarts = asyncio.create_task(restart_agents())
    while not restarts.done():
        assert await pod.dig("web1") == ["10.1.0.7"]
    await restarts
    assert await pod.dig("web1") == ["10.1.0.7"]


async def test_after_a_kill_it_answers_without_an_agent_w40(netdns: Netdns, pod: Pod) -> None:
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    await netdns.send(Tenant(BLUE, zone(web1=WEB1, web2=container("web2", "10.1.0.8"))))
    with pod.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        await asyncio.to_thread(held.connect, (GATEWAYS[0], 53))
        netdns.kill()
        await netdns.start()
    for name, address in (("web1", "10.1.0.7"), ("web2", "10.1.0.8")):
        assert await pod.dig(name) == await pod.dig("+tcp", name) == [address]


async def test_a_removed_tenant_has_no_socket_in_its_netns(netdns: Netdns, pod: Pod, make_netns: MakeNetns) -> None:
    """A socket would keep the netns alive, and with it devices that the next one needs."""
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    tenant = make_netns(BLUE).namespace

    def sockets() -> list[str]:
        files = (Path(f"/proc/thread-self/net/{name}") for name in ("udp", "udp6", "tcp", "tcp6"))
        return [
            line for file in files for line in file.read_text().splitlines()[1:] if ":0035 " in line.split()[1] + " "
        ]

    with pod.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        await asyncio.to_thread(held.connect, (GATEWAYS[0], 53))
        assert await pod.dig("web1") == ["10.1.0.7"]
        assert tenant.run(sockets)
        assert (await netdns.send(Tenant(BLUE))).serving == ()
        assert tenant.run(sockets) == []
    assert (await netdns.send(StatusQuery())).serving == ()


async def test_a_recreated_netns_is_served(netdns: Netdns, make_pod: MakePod, directory: NamespaceDirectory) -> None:
    make_pod(BLUE)
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    directory.delete(BLUE)
    fresh = NamespaceDirectory(directory.path.parent / "more-pods")
    fresh.prepare()
    with directory.create(BLUE) as tenant, fresh.create("pod") as namespace:
        pod = Pod(namespace, tenant=tenant)
        assert (await netdns.send(Tenant(BLUE, zone(web1=WEB1)))).serving == (BLUE,)
        assert await pod.dig("web1") == ["10.1.0.7"]


async def test_a_tenant_is_served_as_soon_as_it_has_a_netns(netdns: Netdns, make_pod: MakePod) -> None:
    assert (await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))).serving == ()
    pod = make_pod(BLUE)
    assert (await netdns.send(Tenant(BLUE, zone(web1=WEB1)))).serving == (BLUE,)
    assert await pod.dig("web1") == ["10.1.0.7"]


async def test_nonsense_and_idle_clients_block_no_other(netdns: Netdns, pod: Pod) -> None:
    """CVE-2025-23028: a crafted message must not end the process."""
    await netdns.send(FullSync({BLUE: zone(web1=WEB1)}))
    random = Random(1)
    idle = [pod.namespace.open_socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(200)]
    try:
        for each in idle:
            await asyncio.to_thread(each.connect, (GATEWAYS[0], 53))
        with pod.namespace.open_socket(socket.AF_INET, socket.SOCK_DGRAM) as loud:
            good = dns.message.make_query("web1", "A", use_edns=0).to_wire()
            for _ in range(2000):
                damaged = bytearray(good)
                for _ in range(3):
                    damaged[random.randrange(len(damaged))] = random.randrange(256)
                loud.sendto(bytes(damaged[: random.randrange(len(damaged) + 1)]), (GATEWAYS[0], 53))
        assert await pod.dig("web1") == ["10.1.0.7"]
    finally:
        for each in idle:
            each.close()
    await eventually(lambda: pod.dig("+tcp", "web1"), lambda found: found == ["10.1.0.7"])
    report = await netdns.send(StatusQuery())
    assert report.statistics["invalid"] > 0


async def test_only_root_may_push_zones(netdns: Netdns) -> None:
    """CVE-2022-29178: sockets of an agent must not be open to local users."""
    for directory in (netdns.socket.parent, *netdns.socket.parent.parents):
        directory.chmod(directory.stat().st_mode | 0o111)
    attempt = f"import socket; socket.socket(socket.AF_UNIX).connect({str(netdns.socket)!r})"
    command = ["setpriv", "--reuid", "65534", "--clear-groups", "/usr/bin/python3", "-c", attempt]
    done = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert "PermissionError" in done.stderr


async def test_changed_entries(netdns: Netdns, pod: Pod) -> None:
    """What every ADD and DEL does: an entry is put or dropped, and its group grows or shrinks."""
    member = Entry((Record("svc1", "A", "10.1.0.9", Rank.GROUP),))
    async with connect_netdns(netdns.socket) as agent:
        await agent.send(FullSync({BLUE: zone(web1=WEB1)}))
        await agent.send(Entries(BLUE, {"endpoint:a": member}))
        assert await pod.dig("svc1") == ["10.1.0.9"]
        await agent.send(Entries(BLUE, {}, ("endpoint:a", "web1")))
        assert await pod.dig("svc1") == await pod.dig("web1") == []


async def test_groups_of_the_cluster_resolve_and_again_after_they_are_recreated_b4(
    netdns: Netdns, make_pod: MakePod
) -> None:
    """End to end: objects of the cluster, the agent's zone pusher, netdns, a client."""
    pod = make_pod(DEFAULT)
    cluster = FakeCluster()
    cluster.put(network())
    pusher = ZonePusher(cluster.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)

    async def resolves(name: str, *addresses: str) -> None:
        pusher.apply(Change(cluster.revision, (Event(StoreKey(f"endpoints/default/blue/{name}"), None),)))
        await eventually(lambda: pod.dig(name), lambda found: found == list(addresses))

    async with background(pusher.run(), name="zone pusher"):
        for _ in range(2):
            for name in ("svc1", "svc2"):
                cluster.put(member_group(name))
                await resolves(name, cluster.attach(name, group=name).ip_address)
            for name in ("svc1", "svc2"):
                cluster.detach(name)
                await resolves(name)
                cluster.delete(member_group(name))
