"""From the cluster to netdns's tables, by the real hand-over; without spaces, so that nothing is served here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, group, kind_of, network, service

from weft.agent.dns import zone_push
from weft.agent.dns.control_client import tell
from weft.agent.dns.zone_push import NamePusher
from weft.dns.control_socket import handover_door
from weft.dns.tenant_sockets import Spaces
from weft.dns.tenants import Tenants
from weft.dns.upstream import Upstreams
from weft.dns.zone_cache import Memory
from weft.domain import codec, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.dns.names import Entry, Rank, Record, Zone
from weft.domain.dns.zones import tenant_zone
from weft.domain.errors import Unavailable
from weft.domain.ids import EndpointId, NetworkName, TenantName
from weft.domain.loadbalancer.kube_objects import (
    DeclaredService,
    EndpointSlice,
    KubeService,
    KubeSlice,
    ServiceSpec,
    SliceEndpoint,
)
from weft.domain.store_types import Change, Delete, Event
from weft.domain.transaction import put
from weft.lab.waiting import soon, until
from weft.runtime.dns_control import Entries, FullSync, StatusQuery, Tenant, encode
from weft.runtime.tasks import background

WEB = Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),))


class Netdns:
    """netdns in this process, with everything but spaces."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.door = home / "dns.sock"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            self.tenants = Tenants(
                spaces=Spaces(self.home / "netns", datapath="linux"),
                upstreams=Upstreams((), file=self.home / "resolv.conf"),
                memory=Memory(self.home / "names"),
                tasks=tasks,
                domain="cluster.local",
                ttl=30,
            )
            await self.tenants.recall()
            async with handover_door(self.door, self.tenants):
                yield
            await self.tenants.close()

    @asynccontextmanager
    async def hung(self) -> AsyncIterator[None]:
        """It hears and does not answer."""
        async with self.tenants._turn:
            yield

    def knows(self, cluster_of: FakeCluster, *tenants: TenantName) -> bool:
        """Whether it holds exactly what the cluster says of these tenants, now and after a restart."""
        return self.tenants.zones == {tenant: tenant_zone(cluster_of.cluster, tenant) for tenant in tenants}


@pytest.fixture
def netdns(tmp_path: Path) -> Netdns:
    return Netdns(tmp_path)


@pytest.fixture
def world() -> FakeCluster:
    world = FakeCluster()
    world.put(network())
    world.put(group())
    world.attach("e1", group="web")
    return world


def changed(pusher: NamePusher, value: model.Value, *, gone: bool = False) -> None:
    """The mirror's word that an object is another one."""
    kind = next(kind for kind in kinds.ALL if isinstance(value, kind.type))
    key = kind.store_key(*kind.key_parts(value))
    pusher.apply(Change(2, (Event(key, None if gone else codec.encode(value)),)))


async def test_netdns_follows_the_cluster(netdns: Netdns, world: FakeCluster) -> None:
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT))
        changed(pusher, world.attach("e2", group="web"))
        await until(lambda: netdns.knows(world, DEFAULT))
        changed(pusher, world.put(service("shop", ip_address="10.1.1.77")))
        await until(lambda: netdns.knows(world, DEFAULT))
        gone = world.cluster.get(kinds.ENDPOINT, "default", "blue", "e1")
        assert gone is not None
        world.detach("e1")
        changed(pusher, gone.value, gone=True)
        await until(lambda: netdns.knows(world, DEFAULT))
        changed(pusher, world.put(network("red", "10.2.0.0/16")))
        await until(lambda: netdns.knows(world, DEFAULT))
        assert "10.2.0.0/16" in netdns.tenants.zones[DEFAULT].subnets


async def test_only_admitted_tenants_are_told_and_withdrawn_ones_are_gone_at_once(
    netdns: Netdns, world: FakeCluster
) -> None:
    red = TenantName("red")
    world.put(model.Tenant(name=red))
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT))
        pusher.add_endpoint(red)
        await until(lambda: netdns.knows(world, DEFAULT, red))
        await soon(pusher.withdraw(red))
        assert netdns.knows(world, DEFAULT)
        changed(pusher, world.put(network("net", "10.9.0.0/24", tenant=red)))
        changed(pusher, world.attach("e2", group="web"))
        await until(lambda: netdns.knows(world, DEFAULT))


async def test_netdns_that_comes_back_is_told_everything(netdns: Netdns, world: FakeCluster) -> None:
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    async with background(pusher.run(), name="names"):
        async with netdns.running():
            await until(lambda: netdns.knows(world, DEFAULT))
        changed(pusher, world.attach("e2", group="web"))
        async with netdns.running():
            await until(lambda: netdns.knows(world, DEFAULT))


async def test_netdns_goes_on_from_what_it_was_told(netdns: Netdns, world: FakeCluster) -> None:
    """W40: names do not depend on a live agent."""
    zone = tenant_zone(world.cluster, DEFAULT)
    async with netdns.running():
        await tell(netdns.door, FullSync({DEFAULT: zone, TenantName("red"): Zone()}))
        await tell(netdns.door, Tenant(TenantName("red")))
    async with netdns.running():
        assert netdns.tenants.zones == {DEFAULT: zone}


async def test_a_tenant_that_is_admitted_again_is_told_anew(netdns: Netdns, world: FakeCluster) -> None:
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT))
        world.attach("e2", group="web")
        pusher.add_endpoint(DEFAULT)
        await until(lambda: netdns.knows(world, DEFAULT))


async def test_rules_that_close_a_way_out_are_told(netdns: Netdns, world: FakeCluster) -> None:
    """CVE-2024-29018."""
    closed: set[str] = set()
    pusher = NamePusher(
        world.cluster, socket=netdns.door, dns_egress_denied=lambda endpoint: endpoint.endpoint_id in closed
    )
    pusher.add_endpoint(DEFAULT)
    (member,) = world.cluster.all(kinds.ENDPOINT)
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT))
        closed.add(member.endpoint_id)
        pusher.touch_rules(DEFAULT)
        await until(
            lambda: netdns.tenants.zones[DEFAULT].entries["endpoint:blue:e1"].dns_egress_denied == (member.ip_address,)
        )
        closed.clear()
        pusher.touch_rules(DEFAULT)
        await until(lambda: not netdns.tenants.zones[DEFAULT].entries["endpoint:blue:e1"].dns_egress_denied)


async def test_whoever_comes_is_told_before_the_store_knows_it_also_to_a_netdns_that_comes_back(
    netdns: Netdns, world: FakeCluster
) -> None:
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    coming = model.Endpoint(
        tenant=DEFAULT, network=NetworkName("blue"), endpoint_id=EndpointId("e2"), group="web", ip_address="10.0.0.9"
    )
    async with background(pusher.run(), name="names"):
        async with netdns.running():
            await until(lambda: pusher.follows)
            pusher.expect(coming)
            await until(lambda: "endpoint:blue:e2" in netdns.tenants.zones[DEFAULT].entries)
        async with netdns.running():
            await until(lambda: pusher.follows)
            await until(lambda: "endpoint:blue:e2" in netdns.tenants.zones[DEFAULT].entries)
            pusher.expect_no_more(coming.key)
            await until(lambda: netdns.knows(world, DEFAULT))


async def test_without_netdns_nothing_is_held_up(netdns: Netdns, world: FakeCluster) -> None:
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    async with background(pusher.run(), name="names"):
        await soon(pusher.withdraw(DEFAULT))
        with pytest.raises(Unavailable):
            await soon(pusher.inspect())


async def test_a_netdns_that_hangs_is_waited_for_once_and_told_when_it_is_back(
    netdns: Netdns, world: FakeCluster
) -> None:
    """The door is open and nobody answers, as when the process is stopped."""
    red = TenantName("red")
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    pusher.add_endpoint(red)
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT, red))
        async with netdns.hung():
            await soon(pusher.withdraw(red))
            assert red in netdns.tenants.zones, "it has not answered in time"
            async with asyncio.timeout(zone_push.WITHDRAWN_WITHIN_S / 2):
                await pusher.withdraw(DEFAULT)
        await until(lambda: netdns.knows(world))


async def test_whom_netdns_asks_is_known_before_names_are_told(netdns: Netdns, world: FakeCluster) -> None:
    """CVE-2024-29018: who may ask depends on whom."""
    resolver = parse_address("192.0.2.53", field="test")
    pusher = NamePusher(world.cluster, socket=netdns.door, dns_egress_denied=lambda _: resolver not in pusher.resolvers)
    pusher.add_endpoint(DEFAULT)
    (netdns.home / "resolv.conf").write_text("nameserver 192.0.2.53\n")
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT))
        (netdns.home / "resolv.conf").write_text("nameserver ::ffff:192.0.2.7\nnameserver fe80::1%eth0\n")
        changed(pusher, world.attach("e2", group="web"))
        await until(lambda: bool(netdns.tenants.zones[DEFAULT].entries["endpoint:blue:e1"].dns_egress_denied))
        assert list(map(str, pusher.resolvers)) == ["192.0.2.7", "fe80::1"]


async def test_what_contiv_showed_is_shown(netdns: Netdns, world: FakeCluster) -> None:
    """contiv 6.7: /inspect/nameserver."""
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT))
        shown = await soon(pusher.inspect())
    assert (shown["serviceQueue"], shown["endpointQueue"], shown["serving"]) == (0, 0, [])
    assert shown["dnsRecords"]["default"]["endpointGroups"] == {"web": ["10.1.1.1"]}
    assert shown["stats"].keys() >= {"foundNameRecord", "noNameRecord", "invalidQuery", "forwarded"}
    msgspec.json.encode(shown)


async def test_changes_need_something_to_build_on(netdns: Netdns) -> None:
    async with netdns.running():
        with pytest.raises(Unavailable, match="does not begin with changes"):
            await tell(netdns.door, Entries(DEFAULT, {"a": WEB}))
        assert netdns.tenants.zones == {}


async def test_what_cannot_be_is_refused_and_the_rest_stands(netdns: Netdns) -> None:
    bad = Entry((Record("web", "A", "nowhere", Rank.GROUP),))
    async with netdns.running():
        await tell(netdns.door, FullSync({DEFAULT: Zone({"a": WEB})}))
        with pytest.raises(Unavailable, match="nowhere"):
            await tell(netdns.door, Tenant(DEFAULT, Zone({"a": bad})))
        with pytest.raises(Unavailable, match="not a name"):
            await tell(netdns.door, Tenant(TenantName("../etc"), Zone()))
        assert netdns.tenants.zones == {DEFAULT: Zone({"a": WEB})}
        red = TenantName("red")
        with pytest.raises(Unavailable, match=r"tenant default: .*nowhere"):
            await tell(netdns.door, FullSync({DEFAULT: Zone({"a": bad}), red: Zone({"b": WEB})}))
        good = {DEFAULT: Zone({"a": WEB}), red: Zone({"b": WEB})}
        assert netdns.tenants.zones == good
    async with netdns.running():
        assert netdns.tenants.zones == good


async def test_a_caller_who_talks_nonsense_is_shown_the_door(netdns: Netdns) -> None:
    async with netdns.running():
        for nonsense in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0"):
            reader, writer = await asyncio.open_unix_connection(netdns.door)
            writer.write(nonsense)
            writer.write_eof()
            assert await soon(reader.read()) == b""
            writer.close()
        assert (await tell(netdns.door, StatusQuery())).serving == ()


def test_frames_say_how_long_they_are() -> None:
    frame = encode(StatusQuery())
    assert int.from_bytes(frame[:4]) == len(frame) - 4


async def test_services_of_kubernetes_are_followed_in_every_tenant_that_has_them(
    netdns: Netdns, world: FakeCluster
) -> None:
    red = TenantName("red")
    world.put(model.Tenant(name=red))
    pusher = NamePusher(world.cluster, socket=netdns.door)
    pusher.add_endpoint(DEFAULT)
    pusher.add_endpoint(red)
    document = KubeService(tenant=DEFAULT, namespace="shop", name="web", service=DeclaredService())
    headless = msgspec.structs.replace(document, service=DeclaredService(spec=ServiceSpec(cluster_ips=("None",))))
    value = EndpointSlice(address_type="IPv4", endpoints=(SliceEndpoint(addresses=("10.1.1.5",)),))
    piece = KubeSlice(tenant=DEFAULT, namespace="shop", service_name="web", name="web-1", slice=value)
    async with netdns.running(), background(pusher.run(), name="names"):
        await until(lambda: netdns.knows(world, DEFAULT, red))
        for each in (headless, piece, msgspec.structs.replace(headless, shared=True), headless):
            kind = kind_of(each)
            world.carry_out(world.reading().plan([put(kind, each)]))
            changed(pusher, each)
            await until(lambda: netdns.knows(world, DEFAULT, red))
        assert "kube:shop:web" in netdns.tenants.zones[DEFAULT].entries
        assert "kube:shop:web" not in netdns.tenants.zones[red].entries
        world.carry_out(world.reading().plan([Delete(kinds.KUBE_SERVICE.store_key("default", "shop", "web"))]))
        changed(pusher, headless, gone=True)
        await until(lambda: netdns.knows(world, DEFAULT, red))
