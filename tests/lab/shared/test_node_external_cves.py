"""CVEs of other projects about node ports, external IPs and loopback, tested on our nodes."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.external_hosts import (
    EXTERNAL,
    NODE_PORT,
    VIPS,
    all_responses,
    host_netns_address,
    pod_addresses,
    responder_names,
    routed,
)
from tests.support.kube_feed import TARGET_PORT, KubeFeed
from tests.support.modes import TOWNS_ALL_IN_SOAK
from tests.support.responders import answering, gets_no_reply, is_refused, query
from tests.support.tenant_fixture import WAIT, TenantFixture

from weft.domain.cluster import Cluster
from weft.domain.host_access.nodeport_vips import nodeport_vips
from weft.domain.ids import StoreKey, TenantName
from weft.drivers import EtcdStoreSettings, open_store
from weft.kernel.netns import Namespace
from weft.lab.hosts import Host
from weft.lab.netlab import NetLab
from weft.lab.traffic import QUIET_S, UDP, NetnsAddress

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("underlay"), TOWNS_ALL_IN_SOAK]

STORE = "etcd"


async def test_cve_2020_8554_an_external_ip_outside_the_tenants_ranges_is_not_served(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress]
) -> None:
    """CVE-2026-32254, CVE-2022-28224 too: a tenant has no external ranges by default, and the log reports it."""
    near, _ = await testbed.pods()
    addresses = [EXTERNAL[4], near.host.address, str(near.address())]
    await feed.put("web", near, clusterIPs=[VIPS[4]], externalIPs=addresses)
    async with answering(pod_addresses([near], 4), port=TARGET_PORT):
        assert await gets_no_reply(external[4], EXTERNAL[4], 80)
        log = (near.host.home / "netplugin.log").read_text()
        assert f"external address {EXTERNAL[4]} is not in externalRanges of the tenant" in log
        await testbed.netctl(f"tenant create {testbed.tenant} --external-range 0.0.0.0/0 --force {WAIT}")
        try:
            assert responder_names(await all_responses(external[4], EXTERNAL[4])) == {near.name}
            assert await is_refused(external[4], near.host.address, 80), "node addresses are never external IPs"
        finally:
            await testbed.netctl(f"tenant create {testbed.tenant} --no-external-range {WAIT}")
        assert await gets_no_reply(external[4], EXTERNAL[4], 80)


@pytest.mark.parametrize("number", [NODE_PORT, 9090])
async def test_cve_2020_8558_loopback_of_a_node_is_not_reachable_from_its_neighbours(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], number: int
) -> None:
    """CVE-2021-25736 too: no packet to or from 127.0.0.1 is accepted from the network, whatever listens there."""
    near, _ = await testbed.pods()
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[4]])
    with ExitStack() as closing:
        loopback = NetnsAddress(closing.enter_context(Namespace.open(near.host.netns)), ip_address("127.0.0.1"))
        listeners = [
            closing.enter_context(place.listening(port, UDP))
            for place, port in ((loopback, number), (near.place(), TARGET_PORT))
        ]
        send_raw(near.host, datagram("192.0.2.254", "127.0.0.1", number))
        send_raw(near.host, datagram("127.0.0.1", near.host.address, number))
        # A fixed observation window: the absence of a packet is no event to wait for.
        await asyncio.sleep(QUIET_S)
        for listener in listeners:
            with pytest.raises(BlockingIOError):
                listener.recv(64)
        assert route_localnet_values(near.host) == {"0"}


def route_localnet_values(host: Host) -> set[str]:
    """The values of route_localnet of all devices."""
    with Namespace.open(host.netns) as machine:
        return machine.run(
            lambda: {path.read_text().strip() for path in Path("/proc/sys/net/ipv4/conf").glob("*/route_localnet")}
        )


def datagram(source: str, target: str, port: int) -> bytes:
    """A UDP datagram in an IPv4 packet, without checksums."""
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
    """Send a raw packet to a host that no kernel would send."""
    mac = inventory.run_json(host.netns, "ip", "-j", "link", "show", "eth0")[0]["address"]
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as wire:
        wire.sendto(packet, ("underlay", 0x0800, 0, 0, bytes.fromhex(mac.replace(":", ""))))


async def test_cve_2019_9946_service_rules_do_not_match_forwarded_traffic(
    testbed: TenantFixture, feed: KubeFeed, external: dict[int, NetnsAddress], external_ranges: None
) -> None:
    """CVE-2025-67499 too. Alias addresses of a tenant are not reachable from outside either."""
    near, far = await testbed.pods()
    await feed.put("web", near, node_port=NODE_PORT, clusterIPs=[VIPS[4]], externalIPs=[EXTERNAL[4]])
    one, two = near.host, far.host
    vip = str(nodeport_vips(await cluster_of(testbed.lab))[TenantName(testbed.tenant)][0])
    async with answering(pod_addresses([near], 4), port=TARGET_PORT):
        assert responder_names({await query(external[4], one.address, NODE_PORT)}) == {near.name}
        with routed("198.18.0.1", one.address), routed(vip, one.address), routed(str(near.address()), one.address):
            for address, port in (("198.18.0.1", NODE_PORT), (vip, NODE_PORT), (str(near.address()), TARGET_PORT)):
                assert await gets_no_reply(external[4], address, port)
        with ExitStack() as closing:
            async with answering({"other": host_netns_address(two, closing, 4)}, port=NODE_PORT + 1):
                assert responder_names({await query(near.place(), two.address, NODE_PORT + 1)}) == {"other"}


async def cluster_of(lab: NetLab) -> Cluster:
    """The lab's cluster, read from the store."""
    cluster = Cluster()
    assert lab.etcd is not None
    async with open_store(EtcdStoreSettings(endpoints=lab.etcd.endpoints)) as store:
        cluster.replace(await store.list(StoreKey("")))
    return cluster
