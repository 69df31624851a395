"""What is nobody else's stays so: loopback of hosts and tenants, and what lies beside the name servers."""

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
from weft.lab.traffic import TCP, UDP, IPAddress, Place
from weft.lab.waiting import until

pytestmark = [BRIDGE_IN_SOAK, OVS_MODES_IN_SOAK]
NET = {"subnet": "10.1.0.0/16", "gateway": "10.1.0.1", "ipv6Subnet": "fd00:1::/64", "ipv6Gateway": "fd00:1::1"}
PORT = 7777
LOOPBACK = {4: ip_address("127.0.0.1"), 6: ip_address("::1")}
ETHERTYPES = {4: 0x0800, 6: 0x86DD}


class Thrower(NamedTuple):
    """Where frames are put on a wire by hand, and who is to take them from it."""

    namespace: Namespace
    device: str
    target_mac: str
    source: IPAddress

    def throw(self, destination: IPAddress) -> None:
        """Send a datagram to an address, whatever routes say."""
        family = destination.version
        with self.namespace.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM) as mouth:
            mac = bytes.fromhex(self.target_mac.replace(":", ""))
            mouth.sendto(datagram(self.source, destination), (self.device, ETHERTYPES[family], 0, 0, mac))


def datagram(source: IPAddress, destination: IPAddress) -> bytes:
    """A whole packet of UDP, its checksums right."""
    payload = b"thrown"
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
def ears(namespace: Namespace, family: int) -> Iterator[socket.socket]:
    """Hears what comes to a namespace for any of its addresses."""
    kind, everywhere = (socket.AF_INET, "0.0.0.0") if family == 4 else (socket.AF_INET6, "::")
    with namespace.open_socket(kind, socket.SOCK_DGRAM) as ear:
        ear.bind((everywhere, PORT))
        ear.setblocking(False)
        yield ear


def hears_something(ear: socket.socket) -> bool:
    with suppress(BlockingIOError):
        return ear.recv(64) == b"thrown"
    return False


def mac_of(namespace: Path, device: str) -> str:
    return str(inventory.ask(namespace, "ip", "-j", "link", "show", device)[0]["address"])


def next_hop(pod: Pod, family: int) -> str:
    """The hardware address to which a pod sends what goes beyond its network."""
    (route,) = inventory.ask(pod.netns, "ip", "-j", f"-{family}", "route", "show", "default")
    known = inventory.ask(pod.netns, "ip", "-j", f"-{family}", "neigh", "show", route["gateway"])
    return str(known[0]["lladdr"])


def routes_of_loopback() -> set[str]:
    """What `route_localnet` is, wherever the calling thread is."""
    return {switch.read_text().strip() for switch in Path("/proc/sys/net/ipv4/conf").glob("*/route_localnet")}


def throwers(pod: Pod, host: Host, outside: Namespace) -> list[Thrower]:
    """A pod, by both families, and a neighbour of its host."""
    (way,) = inventory.ask(Path("/proc/self/ns/net"), "ip", "-j", "route", "get", host.address)
    return [
        *(Thrower(pod.namespace, "eth0", next_hop(pod, family), pod.address(family)) for family in (4, 6)),
        Thrower(outside, way["dev"], mac_of(host.machine, "eth0"), ip_address(way["prefsrc"])),
    ]


async def test_cve_2020_8558_nobody_else_reaches_a_loopback_address(lab: NetLab) -> None:
    """CVE-2021-25736 too: neither a pod nor a neighbour on the wire, on the host or in its tenant's space."""
    await lab.network("net", **NET)
    host = await lab.host("one")
    pod = await host.pod("a", network="net")
    own = {4: ip_address(host.address), 6: ip_address(f"fd77:6566:7400::{host.address}")}
    with ExitStack() as closing:
        outside, machine, space = (
            closing.enter_context(each)
            for each in (Namespace.current(), Namespace.open(host.machine), host.tenants.open("default"))
        )
        for thrower in throwers(pod, host, outside):
            family = thrower.source.version
            with ears(machine, family) as on_host, ears(space, family) as in_space:
                thrower.throw(own[family])
                await until(partial(hears_something, on_host))
                thrower.throw(LOOPBACK[family])
                await asyncio.sleep(SILENCE_S)
                assert not hears_something(on_host)
                assert not hears_something(in_space)
        for namespace in (machine, space):
            assert namespace.run(routes_of_loopback) == {"0"}


async def test_cve_2025_0650_a_name_server_in_reach_opens_nothing_else(lab: NetLab) -> None:
    """Who may not go out still asks for names: that way leads to the name server's port, and to nobody beside it."""
    await lab.network("net", **NET)
    policy = {"tenantName": "default", "policyName": "closed"}
    (await lab.rest.put("policys", **policy)).accepted()
    (await lab.rest.put("rules", **policy, ruleId="1", direction="out", action="deny")).accepted()
    await lab.group("closed", network="net", policies=["closed"])
    host = await lab.host("one")
    closed, free = await host.pod("in", group="closed"), await host.pod("out", network="net")
    with Namespace.open(host.tenants.path / "default") as space:
        for family, gateway in ((4, NET["gateway"]), (6, NET["ipv6Gateway"])):
            assert await closed.dig("out", "A", family=family) == [str(free.address())]
            for transport in (TCP, UDP):
                mouth = closed.place(family)
                assert await traffic.never_reaches(mouth, free.place(family), port=53, transport=transport)
                beside = Place(space, ip_address(gateway))
                assert await traffic.never_reaches(mouth, beside, port=54, transport=transport)
