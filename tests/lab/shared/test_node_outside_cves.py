"""CVEs of other projects at node ports, external addresses and loopback, tried on our nodes."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.external_hosts import EXTERNAL, NODE_PORT, VIPS, host_place, names, places, routed, who_answers
from tests.support.kube_feed import TARGET_PORT, KubeFeed
from tests.support.modes import TOWNS_ALL_IN_SOAK
from tests.support.responders import answering, ask, is_ignored, is_refused
from tests.support.tenant_fixture import WAIT, TenantFixture

from weft.domain.cluster import Cluster
from weft.domain.host_access.nodeport_vips import doors
from weft.domain.ids import StoreKey, TenantName
from weft.drivers import EtcdStoreSettings, open_store
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.traffic import QUIET_S, UDP, Place

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("underlay"), TOWNS_ALL_IN_SOAK]

STORE = "etcd"


async def test_cve_2020_8554_an_external_address_that_is_not_the_tenants_is_not_served(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place]
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


@pytest.mark.parametrize("number", [NODE_PORT, 9090])
async def test_cve_2020_8558_loopback_of_a_node_is_not_for_its_neighbours(
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], number: int
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
    town: TenantFixture, feed: KubeFeed, world: dict[int, Place], owning: None
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
