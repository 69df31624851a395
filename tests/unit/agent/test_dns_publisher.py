"""The DNS publisher: the zone pusher with the real netdns, without netns; then when zones of a node are pushed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, group, kind_of, network, service
from tests.support.fake_datapath import FakeNode, fake_node

from weft.agent import dns_publisher
from weft.agent.dns_publisher import DnsPublisher, ZonePusher
from weft.dns.control import Tenants, serve_control_socket
from weft.dns.tenant_sockets import TenantNetnsSockets
from weft.dns.upstream import Upstreams
from weft.dns.zone_cache import ZoneCache
from weft.domain import codec, kinds, model
from weft.domain.addresses import parse_address
from weft.domain.dns.names import Entry, Rank, Record, Transports, Zone
from weft.domain.dns.zones import tenant_zone
from weft.domain.errors import Unavailable
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, TenantName
from weft.domain.loadbalancer.kube_objects import (
    EndpointSlice,
    KubeService,
    KubeSlice,
    ServiceObject,
    ServicePort,
    ServiceSpec,
    SliceEndpoint,
)
from weft.domain.store_types import Change, Delete, Event, Listing
from weft.domain.transaction import put
from weft.lab.waiting import soon, until
from weft.ports.store import Compare, Revision, Write
from weft.runtime.dns_control import (
    Entries,
    FullSync,
    Message,
    Report,
    StatusQuery,
    Tenant,
    decode_message,
    encode,
    read_body,
    send_once,
)
from weft.runtime.store.mirror import EVERYTHING
from weft.runtime.tasks import background

WEB = Entry((Record("web", "A", "10.0.0.2", Rank.GROUP),))
GONE = TenantName("gone")


class Netdns:
    """netdns in this process, without tenant netns."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.socket = home / "dns.sock"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            self.tenants = Tenants(
                sockets=TenantNetnsSockets(self.home / "netns", datapath="linux"),
                upstreams=Upstreams((), file=self.home / "resolv.conf"),
                zone_cache=ZoneCache(self.home / "zones"),
                tasks=tasks,
                domain="cluster.local",
                ttl=30,
            )
            await self.tenants.load_zones()
            async with serve_control_socket(self.socket, self.tenants):
                yield
            await self.tenants.close()

    @asynccontextmanager
    async def hung(self) -> AsyncIterator[None]:
        """It accepts messages and does not answer."""
        async with self.tenants._lock:
            yield

    def knows(self, cluster_of: FakeCluster, *tenants: TenantName) -> bool:
        """Whether it has exactly the zones of these tenants."""
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


def changed(pusher: ZonePusher, value: model.Value, *, gone: bool = False) -> None:
    """The mirror's event for a changed object."""
    kind = next(kind for kind in kinds.ALL if isinstance(value, kind.type))
    key = kind.store_key(*kind.key_parts(value))
    pusher.apply(Change(2, (Event(key, None if gone else codec.encode(value)),)))


async def test_netdns_follows_changes_of_the_cluster(netdns: Netdns, world: FakeCluster) -> None:
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
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


async def test_only_tenants_with_a_netns_are_pushed_and_removed_ones_are_gone_at_once(
    netdns: Netdns, world: FakeCluster
) -> None:
    red = TenantName("red")
    world.put(model.Tenant(name=red))
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
        await until(lambda: netdns.knows(world, DEFAULT))
        pusher.add_tenant(red)
        await until(lambda: netdns.knows(world, DEFAULT, red))
        await soon(pusher.remove_tenant(red))
        assert netdns.knows(world, DEFAULT)
        changed(pusher, world.put(network("net", "10.9.0.0/24", tenant=red)))
        changed(pusher, world.attach("e2", group="web"))
        await until(lambda: netdns.knows(world, DEFAULT))


async def test_a_restarted_netdns_gets_a_full_sync(netdns: Netdns, world: FakeCluster) -> None:
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    async with background(pusher.run(), name="dns publisher"):
        async with netdns.running():
            await until(lambda: netdns.knows(world, DEFAULT))
        changed(pusher, world.attach("e2", group="web"))
        async with netdns.running():
            await until(lambda: netdns.knows(world, DEFAULT))


async def test_netdns_restarts_from_its_zone_cache(netdns: Netdns, world: FakeCluster) -> None:
    """W40: names do not depend on a live agent."""
    zone = tenant_zone(world.cluster, DEFAULT)
    async with netdns.running():
        await send_once(netdns.socket, FullSync({DEFAULT: zone, TenantName("red"): Zone()}))
        await send_once(netdns.socket, Tenant(TenantName("red")))
    async with netdns.running():
        assert netdns.tenants.zones == {DEFAULT: zone}


async def test_a_tenant_that_is_added_again_is_pushed_again(netdns: Netdns, world: FakeCluster) -> None:
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
        await until(lambda: netdns.knows(world, DEFAULT))
        world.attach("e2", group="web")
        pusher.add_tenant(DEFAULT)
        await until(lambda: netdns.knows(world, DEFAULT))


async def test_denied_dns_egress_is_pushed(netdns: Netdns, world: FakeCluster) -> None:
    """CVE-2024-29018."""
    closed: dict[str, Transports] = {}
    pusher = ZonePusher(
        world.cluster,
        socket=netdns.socket,
        dns_egress_denied=lambda endpoint: closed.get(endpoint.endpoint_id, Transports.NONE),
    )
    pusher.add_tenant(DEFAULT)
    (member,) = world.cluster.all(kinds.ENDPOINT)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
        await until(lambda: netdns.knows(world, DEFAULT))
        closed[member.endpoint_id] = Transports.UDP
        pusher.policy_changed(DEFAULT)
        await until(
            lambda: netdns.tenants.zones[DEFAULT].entries["endpoint:blue:e1"].dns_egress_denied == (member.ip_address,)
        )
        closed[member.endpoint_id] = Transports.TCP
        pusher.policy_changed(DEFAULT)
        await until(
            lambda: (
                netdns.tenants.zones[DEFAULT].entries["endpoint:blue:e1"].tcp_dns_egress_denied == (member.ip_address,)
            )
        )
        closed.clear()
        pusher.policy_changed(DEFAULT)
        await until(lambda: not netdns.tenants.zones[DEFAULT].entries["endpoint:blue:e1"].dns_egress_denied)


async def test_an_endpoint_is_pushed_before_the_store_has_it_also_to_a_restarted_netdns(
    netdns: Netdns, world: FakeCluster
) -> None:
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    coming = model.Endpoint(
        tenant=DEFAULT, network=NetworkName("blue"), endpoint_id=EndpointId("e2"), group="web", ip_address="10.0.0.9"
    )
    async with background(pusher.run(), name="dns publisher"):
        async with netdns.running():
            await until(lambda: pusher.in_sync)
            pusher.add_endpoint(coming)
            await until(lambda: "endpoint:blue:e2" in netdns.tenants.zones[DEFAULT].entries)
        async with netdns.running():
            await until(lambda: pusher.in_sync)
            await until(lambda: "endpoint:blue:e2" in netdns.tenants.zones[DEFAULT].entries)
            pusher.remove_endpoint(coming.key)
            await until(lambda: netdns.knows(world, DEFAULT))


async def test_without_netdns_nothing_waits(netdns: Netdns, world: FakeCluster) -> None:
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    async with background(pusher.run(), name="dns publisher"):
        await soon(pusher.remove_tenant(DEFAULT))
        with pytest.raises(Unavailable):
            await soon(pusher.inspect())


async def test_a_hung_netdns_is_waited_for_once_and_gets_the_changes_later(netdns: Netdns, world: FakeCluster) -> None:
    """The socket accepts and nothing answers, as when the process is stopped."""
    red = TenantName("red")
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    pusher.add_tenant(red)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
        await until(lambda: netdns.knows(world, DEFAULT, red))
        async with netdns.hung():
            await soon(pusher.remove_tenant(red))
            assert red in netdns.tenants.zones, "it has not answered in time"
            async with asyncio.timeout(dns_publisher.REMOVE_TIMEOUT_S / 2):
                await pusher.remove_tenant(DEFAULT)
        await until(lambda: netdns.knows(world))


async def test_the_upstreams_are_known_before_zones_are_pushed(netdns: Netdns, world: FakeCluster) -> None:
    """CVE-2024-29018: the verdict depends on the upstreams."""
    resolver = parse_address("192.0.2.53", field="test")

    def denied(_: model.Endpoint) -> Transports:
        return Transports.NONE if resolver in pusher.upstreams else Transports.BOTH

    pusher = ZonePusher(world.cluster, socket=netdns.socket, dns_egress_denied=denied)
    pusher.add_tenant(DEFAULT)
    (netdns.home / "resolv.conf").write_text("nameserver 192.0.2.53\n")
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
        await until(lambda: netdns.knows(world, DEFAULT))
        (netdns.home / "resolv.conf").write_text("nameserver ::ffff:192.0.2.7\nnameserver fe80::1%eth0\n")
        changed(pusher, world.attach("e2", group="web"))
        await until(lambda: bool(netdns.tenants.zones[DEFAULT].entries["endpoint:blue:e1"].dns_egress_denied))
        assert list(map(str, pusher.upstreams)) == ["192.0.2.7", "fe80::1"]


async def test_inspect_has_contivs_members(netdns: Netdns, world: FakeCluster) -> None:
    """contiv 6.7: /inspect/nameserver."""
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
        await until(lambda: netdns.knows(world, DEFAULT))
        shown = await soon(pusher.inspect())
    assert (shown["serviceQueue"], shown["endpointQueue"], shown["serving"]) == (0, 0, [])
    assert shown["dnsRecords"]["default"]["endpointGroups"] == {"web": ["10.1.1.1"]}
    assert shown["stats"].keys() >= {"foundNameRecord", "noNameRecord", "invalidQuery", "forwarded"}
    msgspec.json.encode(shown)


async def test_a_connection_must_not_begin_with_changed_entries(netdns: Netdns) -> None:
    async with netdns.running():
        with pytest.raises(Unavailable, match="must not begin with changes"):
            await send_once(netdns.socket, Entries(DEFAULT, {"a": WEB}))
        assert netdns.tenants.zones == {}


async def test_H5_netdns_refuses_record_by_record_and_never_a_zone(netdns: Netdns) -> None:
    bad = Record("web", "A", "nowhere", Rank.GROUP)
    red, outside = TenantName("red"), TenantName("../etc")
    zones = {DEFAULT: Zone({"a": Entry((bad, *WEB.records))}), red: Zone({"b": WEB})}
    async with netdns.running():
        report = await send_once(netdns.socket, FullSync({**zones, outside: Zone()}))
        assert (report.error, report.rejected) == ("", 2)
        assert netdns.tenants.zones == zones
        assert "../etc" in report.fault
        report = await send_once(netdns.socket, FullSync(zones))
        assert report.rejected == 1
        assert "nowhere" in report.fault
    async with netdns.running():
        assert netdns.tenants.zones == zones
        assert (await send_once(netdns.socket, StatusQuery())).rejected == 1
        assert (await send_once(netdns.socket, Tenant(DEFAULT))).rejected == 0


@pytest.mark.parametrize("content", [None, b"\0\0\0\5\x81\xa4type", b"\xff" * 4096])
async def test_netdns_starts_with_garbage_in_the_place_of_its_zone_cache(netdns: Netdns, content: bytes | None) -> None:
    path = netdns.home / "zones"
    path.write_bytes(content) if content else path.mkdir()
    async with netdns.running():
        await send_once(netdns.socket, FullSync({DEFAULT: Zone({"a": WEB})}))
        assert netdns.tenants.zones == {DEFAULT: Zone({"a": WEB})}


async def test_tenants_whose_zone_follows_keep_theirs(netdns: Netdns) -> None:
    red = TenantName("red")
    async with netdns.running():
        await send_once(netdns.socket, FullSync({DEFAULT: Zone({"a": WEB}), red: Zone({"b": WEB})}))
        await send_once(netdns.socket, FullSync({}, pending=(red, TenantName("new"))))
        assert netdns.tenants.zones == {red: Zone({"b": WEB})}
    async with netdns.running():
        assert netdns.tenants.zones == {red: Zone({"b": WEB})}


async def test_a_client_that_sends_nonsense_is_disconnected(netdns: Netdns) -> None:
    async with netdns.running():
        for nonsense in (b"\xff\xff\xff\xff", b"\0\0\0\1\xc1", b"\0\0"):
            reader, writer = await asyncio.open_unix_connection(netdns.socket)
            writer.write(nonsense)
            writer.write_eof()
            assert await soon(reader.read()) == b""
            writer.close()
        assert (await send_once(netdns.socket, StatusQuery())).serving == ()


def test_frames_begin_with_their_length() -> None:
    frame = encode(StatusQuery())
    assert int.from_bytes(frame[:4]) == len(frame) - 4


async def test_kubernetes_services_are_pushed_to_every_tenant_that_has_them(netdns: Netdns, world: FakeCluster) -> None:
    red = TenantName("red")
    world.put(model.Tenant(name=red))
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    pusher.add_tenant(red)
    document = KubeService(tenant=DEFAULT, namespace="shop", name="web", service=ServiceObject())
    headless = msgspec.structs.replace(document, service=ServiceObject(spec=ServiceSpec(cluster_ips=("None",))))
    value = EndpointSlice(address_type="IPv4", endpoints=(SliceEndpoint(addresses=("10.1.1.5",)),))
    piece = KubeSlice(tenant=DEFAULT, namespace="shop", service_name="web", name="web-1", slice=value)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
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


LONG = "p" * 63
HOSTILE = (
    pytest.param({"cluster_ips": ("10.96.0.9",), "ports": (ServicePort(name=LONG, port=80),)}, id="port name"),
    pytest.param({"type": "ExternalName", "external_name": f"{LONG}x.example.org"}, id="external name"),
    pytest.param({"type": "ExternalName", "external_name": "a..b"}, id="empty label"),
)


@pytest.mark.parametrize("spec", HOSTILE)
async def test_H5_one_service_does_not_stop_the_names_of_others(
    netdns: Netdns, world: FakeCluster, spec: dict[str, object]
) -> None:
    """Neither in its own tenant nor, shared, in the others; and it is not pushed again and again."""
    red = TenantName("red")
    world.put(model.Tenant(name=red))
    bad = KubeService(
        tenant=DEFAULT,
        namespace="shop",
        name="bad",
        shared=True,
        service=ServiceObject(spec=ServiceSpec(**spec)),  # type: ignore[arg-type]
    )
    world.carry_out(world.reading().plan([put(kind_of(bad), bad)]))
    pusher = ZonePusher(world.cluster, socket=netdns.socket)
    pusher.add_tenant(DEFAULT)
    pusher.add_tenant(red)
    async with netdns.running(), background(pusher.run(), name="dns publisher"):
        await until(lambda: pusher.in_sync)
        assert set(netdns.tenants.zones) == {DEFAULT, red}
        changed(pusher, world.attach("e2", group="web"))
        await until(lambda: "endpoint:blue:e2" in netdns.tenants.zones[DEFAULT].entries)
        changed(pusher, bad)
        changed(pusher, world.attach("e3", group="web"))
        await until(lambda: "endpoint:blue:e3" in netdns.tenants.zones[DEFAULT].entries)
        assert pusher.in_sync
        shown = await soon(pusher.inspect())
        assert shown["leftOut"]["default"]["kube:shop:bad"]["records"] == 1
        assert shown["leftOut"]["red"].keys() == {"kube:shop:bad"}
        assert pusher.records_left_out == 2
        good = msgspec.structs.replace(bad, service=ServiceObject(spec=ServiceSpec(cluster_ips=("10.96.0.9",))))
        world.carry_out(world.reading().plan([put(kind_of(good), good)]))
        changed(pusher, good)
        await until(lambda: pusher.records_left_out == 0)


async def test_a_report_of_a_confused_netdns_does_no_harm(
    node: FakeNode, publisher: DnsPublisher, fake_netdns: FakeNetdns
) -> None:
    """netdns parses packets of everybody: what it says is input, too."""
    await node.reconciler.converge()
    fake_netdns.upstreams = ("garbage", "192.0.2.54", "::1%eth0")
    async with background(publisher.run(), name="dns publisher"):
        await until(lambda: publisher.in_sync)
        await node.call("ADD", "c1")
        await until(lambda: owners(fake_netdns) == {"endpoint:default-net:c1"})


class FakeNetdns:
    """Stands in for netdns: it accepts every message and keeps the zone of each tenant."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        # What an earlier agent has pushed.
        self.zones: dict[TenantName, dict[str, Entry]] = {GONE: {}}
        self.messages: list[Message] = []
        self.upstreams: tuple[str, ...] = ("192.0.2.53",)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        async with await asyncio.start_unix_server(self._serve, self.socket):
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                self._apply(decode_message(await read_body(reader)))
                writer.write(encode(Report(serving=tuple(self.zones), upstreams=self.upstreams)))
        except (asyncio.IncompleteReadError, ConnectionResetError):
            writer.close()

    def _apply(self, message: Message) -> None:
        self.messages.append(message)
        match message:
            case FullSync():
                kept = {tenant: self.zones.get(tenant, {}) for tenant in message.pending}
                self.zones = kept | {tenant: dict(zone.entries) for tenant, zone in message.zones.items()}
            case Tenant(tenant, Zone() as zone):
                self.zones[tenant] = dict(zone.entries)
            case Tenant(tenant):
                self.zones.pop(tenant, None)
            case Entries(tenant, put, drop):
                self.zones[tenant] |= put
                for owner in drop:
                    self.zones[tenant].pop(owner, None)

    def dns_egress_denied(self) -> set[str]:
        return {
            address for zone in self.zones.values() for entry in zone.values() for address in entry.dns_egress_denied
        }


@pytest.fixture
async def fake_netdns(tmp_path: Path) -> AsyncIterator[FakeNetdns]:
    fake_netdns = FakeNetdns(tmp_path / "dns.sock")
    async with fake_netdns.listening():
        yield fake_netdns


@pytest.fixture
async def node(fake_netdns: FakeNetdns) -> AsyncIterator[FakeNode]:
    async with fake_node(dns_socket=fake_netdns.socket) as node:
        yield node


@pytest.fixture
def publisher(node: FakeNode) -> DnsPublisher:
    assert node.dns is not None
    return node.dns


def owners(fake_netdns: FakeNetdns) -> set[str]:
    return set(fake_netdns.zones.get(DEFAULT, ()))


async def test_netdns_leaves_netns_that_an_earlier_agent_has_left_over(
    node: FakeNode, publisher: DnsPublisher, fake_netdns: FakeNetdns
) -> None:
    await node.reconciler.converge()
    assert fake_netdns.messages[1:] == [Tenant(GONE)]
    assert not publisher.in_sync


async def test_zones_follow_attachments_and_the_tenant_goes_with_the_last_one(
    node: FakeNode, publisher: DnsPublisher, fake_netdns: FakeNetdns
) -> None:
    await node.reconciler.converge()
    async with background(publisher.run(), name="dns publisher"):
        await until(lambda: publisher.in_sync)
        await node.call("ADD", "c1")
        await until(lambda: owners(fake_netdns) == {"endpoint:default-net:c1"})
        await node.call("ADD", "c2")
        await until(lambda: owners(fake_netdns) == {"endpoint:default-net:c1", "endpoint:default-net:c2"})
        await node.call("DEL", "c1")
        await until(lambda: owners(fake_netdns) == {"endpoint:default-net:c2"})
        await node.call("DEL", "c2")
        await node.reconciler.converge()
        assert DEFAULT not in fake_netdns.zones


async def test_an_endpoint_is_pushed_once_and_before_the_store_has_it(
    node: FakeNode, publisher: DnsPublisher, fake_netdns: FakeNetdns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may send queries at once, and without a verdict they would be forwarded (CVE-2024-29018)."""
    await node.reconciler.converge()
    async with background(publisher.run(), name="dns publisher"):
        await until(lambda: publisher.in_sync)
        await node.call("ADD", "c0")
        await until(lambda: owners(fake_netdns) == {"endpoint:default-net:c0"})
        fake_netdns.messages.clear()
        pushed = asyncio.Event()
        commit = node.store.commit

        async def held_up(compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
            await pushed.wait()
            return await commit(compares, writes)

        monkeypatch.setattr(node.store, "commit", held_up)
        await node.call("ADD", "c1")
        await until(lambda: "endpoint:default-net:c1" in owners(fake_netdns))
        assert node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1") is None
        pushed.set()
        await until(lambda: node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1") is not None)
        await node.call("ADD", "c2")
        await until(lambda: "endpoint:default-net:c2" in owners(fake_netdns))
        changes = [each for each in fake_netdns.messages if isinstance(each, Entries)]
        assert [sorted(each.put) for each in changes] == [["endpoint:default-net:c1"], ["endpoint:default-net:c2"]]


async def test_dns_egress_follows_policy_cve_2024_29018(
    node: FakeNode, publisher: DnsPublisher, fake_netdns: FakeNetdns
) -> None:
    await node.reconciler.converge()
    async with background(publisher.run(), name="dns publisher"):
        await node.call("ADD", "c1")
        await until(lambda: bool(owners(fake_netdns)) and not fake_netdns.dns_egress_denied())
        await until(lambda: node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1") is not None)
        stored = node.cluster.get(kinds.ENDPOINT, "default", "default-net", "c1")
        assert stored is not None
        node.features.policies.by_tenant[DEFAULT].engine.remove_endpoint(EndpointKey(*stored.value.key))
        publisher.apply(Change(99, (Event(kinds.POLICY.store_key("default", "p"), None),)))
        await until(lambda: fake_netdns.dns_egress_denied() == {stored.value.ip_address})


async def test_after_a_new_listing_all_zones_are_pushed_when_policy_is_known(
    node: FakeNode, publisher: DnsPublisher, fake_netdns: FakeNetdns
) -> None:
    await node.reconciler.converge()
    async with background(publisher.run(), name="dns publisher"):
        await node.call("ADD", "c1")
        await until(lambda: bool(owners(fake_netdns)) and not fake_netdns.dns_egress_denied())
        listing = await node.store.list(EVERYTHING)
        fake_netdns.messages.clear()
        for subscriber in (node.cluster, node.desired, publisher):
            subscriber.replace(Listing(listing.entries, listing.revision))
        await node.reconciler.refresh()
        await until(lambda: any(isinstance(each, Tenant) for each in fake_netdns.messages))
        assert not fake_netdns.dns_egress_denied()
