"""Loopback addresses and ports beside the DNS server are not reachable from pods or neighbours."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from tests.support import inventory
from tests.support.connectivity import SILENCE_S
from tests.support.modes import BRIDGE_IN_SOAK, OVS_MODES_IN_SOAK

from weft.ctl.weft.mtu_probe import checksum
from weft.kernel.netns import Namespace
from weft.lab import traffic
from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import TCP, UDP, IPAddress, NetnsAddress
from weft.lab.waiting import until

pytestmark = [BRIDGE_IN_SOAK, OVS_MODES_IN_SOAK]
NET = {"subnet": "10.1.0.0/16", "gateway": "10.1.0.1", "ipv6Subnet": "fd00:1::/64", "ipv6Gateway": "fd00:1::1"}
PORT = 7777
LOOPBACK = {4: ip_address("127.0.0.1"), 6: ip_address("::1")}
ETHERTYPES = {4: 0x0800, 6: 0x86DD}


class RawSender(NamedTuple):
    """A raw socket that sends frames from a device to a given MAC."""

    namespace: Namespace
    device: str
    target_mac: str
    source: IPAddress

    def send(self, destination: IPAddress) -> None:
        """Send a datagram to an address, bypassing the routing table."""
        family = destination.version
        with self.namespace.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM) as sender:
            mac = bytes.fromhex(self.target_mac.replace(":", ""))
            sender.sendto(datagram(self.source, destination), (self.device, ETHERTYPES[family], 0, 0, mac))


def datagram(source: IPAddress, destination: IPAddress) -> bytes:
    """A UDP packet with IP header and valid checksums."""
    payload = b"raw"
    length = 8 + len(payload)
    pseudo = source.packed + destination.packed + struct.pack(">II", length, socket.IPPROTO_UDP)
    unsummed = struct.pack(">HHHH", PORT, PORT, length, 0) + payload
    udp = struct.pack(">HHHH", PORT, PORT, length, checksum(pseudo + unsummed)) + payload
    if destination.version == 6:
        return struct.pack(">IHBB", 6 << 28, length, socket.IPPROTO_UDP, 64) + source.packed + destination.packed + udp
    head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + length, 0, 0, 64, socket.IPPROTO_UDP, 0)
    head += source.packed + destination.packed
    return head[:10] + struct.pack(">H", checksum(head)) + head[12:] + udp


@contextmanager
def any_address_listener(namespace: Namespace, family: int) -> Iterator[socket.socket]:
    """A UDP socket on the wildcard address of a namespace."""
    kind, everywhere = (socket.AF_INET, "0.0.0.0") if family == 4 else (socket.AF_INET6, "::")
    with namespace.open_socket(kind, socket.SOCK_DGRAM) as listener:
        listener.bind((everywhere, PORT))
        listener.setblocking(False)
        yield listener


def has_received(listener: socket.socket) -> bool:
    with suppress(BlockingIOError):
        return listener.recv(64) == b"raw"
    return False


def mac_of(namespace: Path, device: str) -> str:
    return str(inventory.run_json(namespace, "ip", "-j", "link", "show", device)[0]["address"])


def next_hop(pod: Pod, family: int) -> str:
    """The MAC of the pod's default gateway."""
    (route,) = inventory.run_json(pod.netns, "ip", "-j", f"-{family}", "route", "show", "default")
    known = inventory.run_json(pod.netns, "ip", "-j", f"-{family}", "neigh", "show", route["gateway"])
    return str(known[0]["lladdr"])


def route_localnet_values() -> set[str]:
    """The values of `route_localnet` in the namespace of the calling thread."""
    return {switch.read_text().strip() for switch in Path("/proc/sys/net/ipv4/conf").glob("*/route_localnet")}


def raw_senders(pod: Pod, host: Host, outside: Namespace) -> list[RawSender]:
    """A pod, for both families, and a neighbour of its host on the underlay."""
    (route,) = inventory.run_json(Path("/proc/self/ns/net"), "ip", "-j", "route", "get", host.address)
    return [
        *(RawSender(pod.namespace, "eth0", next_hop(pod, family), pod.address(family)) for family in (4, 6)),
        RawSender(outside, route["dev"], mac_of(host.netns, "eth0"), ip_address(route["prefsrc"])),
    ]


async def test_cve_2020_8558_loopback_addresses_are_not_reachable(lab: NetLab) -> None:
    """CVE-2021-25736 too: neither from a pod nor from a neighbour, neither on the host nor in the tenant netns."""
    await lab.network("net", **NET)
    host = await lab.host("one")
    pod = await host.pod("a", network="net")
    own = {4: ip_address(host.address), 6: ip_address(f"fd77:6566:7400::{host.address}")}
    with ExitStack() as closing:
        outside, machine, tenant_netns = (
            closing.enter_context(each)
            for each in (Namespace.current(), Namespace.open(host.netns), host.tenants.open("default"))
        )
        for sender in raw_senders(pod, host, outside):
            family = sender.source.version
            with (
                any_address_listener(machine, family) as on_host,
                any_address_listener(tenant_netns, family) as in_tenant_netns,
            ):
                sender.send(own[family])
                await until(partial(has_received, on_host))
                sender.send(LOOPBACK[family])
                # A fixed observation window: the absence of a packet is no event to wait for.
                await asyncio.sleep(SILENCE_S)
                assert not has_received(on_host)
                assert not has_received(in_tenant_netns)
        for namespace in (machine, tenant_netns):
            assert namespace.run(route_localnet_values) == {"0"}


async def test_cve_2025_0650_dns_access_opens_no_other_port(lab: NetLab) -> None:
    """A pod with denied egress may still query DNS, but reaches no other port or host through it."""
    await lab.network("net", **NET)
    policy = {"tenantName": "default", "policyName": "closed"}
    (await lab.rest.put("policys", **policy)).accepted()
    (await lab.rest.put("rules", **policy, ruleId="1", direction="out", action="deny")).accepted()
    await lab.group("closed", network="net", policies=["closed"])
    host = await lab.host("one")
    closed, free = await host.pod("in", group="closed"), await host.pod("out", network="net")
    with Namespace.open(host.tenants.path / "default") as tenant_netns:
        for family, gateway in ((4, NET["gateway"]), (6, NET["ipv6Gateway"])):
            assert await closed.dig("out", "A", family=family) == [str(free.address())]
            for transport in (TCP, UDP):
                sender = closed.place(family)
                assert await traffic.never_reaches(sender, free.place(family), port=53, transport=transport)
                other_port = NetnsAddress(tenant_netns, ip_address(gateway))
                assert await traffic.never_reaches(sender, other_port, port=54, transport=transport)
