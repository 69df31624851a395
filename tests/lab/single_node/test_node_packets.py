"""MTU-sized packets, spoofed sources and router messages from pods (docs/design/linux-policy.md)."""

from __future__ import annotations

import asyncio
import errno
import socket
import struct

import pytest
from tests.support import inventory
from tests.support.modes import BOTH_MODES, OVS_MODES_IN_SOAK

from weft.lab.hosts import Host, Pod
from weft.lab.netlab import NetLab
from weft.lab.traffic import QUIET_S

_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER, _DO = 10, 23, 2
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_HEADERS = {4: 28, 6: 48}
MTU = 1450


@pytest.fixture
async def hosts(lab: NetLab) -> list[Host]:
    await lab.network("net", subnet="10.1.0.0/16", gateway="10.1.255.254", ipv6Subnet="2001:db8:1::/64")
    return list(await asyncio.gather(lab.host("one"), lab.host("two")))


def listening(pod: Pod, family: int) -> socket.socket:
    listener = pod.namespace.open_socket(_FAMILIES[family], socket.SOCK_DGRAM)
    listener.setblocking(False)
    listener.bind((str(pod.address(family)), 5000))
    return listener


async def receive(listener: socket.socket, *, within: float) -> bytes | None:
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(listener, 65_536), within)
    except TimeoutError:
        return None


@OVS_MODES_IN_SOAK
@BOTH_MODES
@pytest.mark.parametrize("family", [4, 6])
async def test_mtu_sized_packets_pass_and_larger_ones_get_emsgsize(hosts: list[Host], family: int) -> None:
    a, b, c = [await host.pod(name, network="net") for name, host in zip("abc", (*hosts, hosts[0]), strict=True)]
    payload = MTU - _HEADERS[family]
    for target in (b, c):
        assert await a.eventually_reaches(target, family=family)
        with (
            listening(target, family) as listener,
            a.namespace.open_socket(_FAMILIES[family], socket.SOCK_DGRAM) as sender,
        ):
            if family == 4:
                sender.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _DO)
            else:
                sender.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _DO)
            sender.connect((str(target.address(family)), 5000))
            sender.send(b"x" * payload)
            assert await receive(listener, within=30) == b"x" * payload
            with pytest.raises(OSError, match="too long") as refused:
                sender.send(b"x" * (payload + 1))
            assert refused.value.errno == errno.EMSGSIZE


@OVS_MODES_IN_SOAK
@BOTH_MODES
@pytest.mark.parametrize("family", [4, 6])
async def test_spoofed_sources_of_pods_are_dropped(hosts: list[Host], family: int) -> None:
    """A pod can send with its own IP and MAC only, to pods of its own and of other hosts."""
    a, b, c = [await host.pod(name, network="net") for name, host in zip("abc", (*hosts, hosts[0]), strict=True)]
    spoofed = "10.1.77.77" if family == 4 else "2001:db8:1::77"
    inventory.run(
        a.netns, f"ip addr add {spoofed}/{32 if family == 4 else 128} dev eth0" + (" nodad" if family == 6 else "")
    )
    for target in (b, c):
        assert await a.eventually_reaches(target, family=family)
        with (
            listening(target, family) as listener,
            a.namespace.open_socket(_FAMILIES[family], socket.SOCK_DGRAM) as sender,
        ):
            sender.bind((spoofed, 0))
            sender.sendto(b"spoofed", (str(target.address(family)), 5000))
            assert await receive(listener, within=QUIET_S) is None
    inventory.run(a.netns, "ip link set eth0 address 02:00:00:00:00:66")
    for target in (b, c):
        assert await a.never_reaches(target, family=family)


@OVS_MODES_IN_SOAK
@BOTH_MODES
async def test_router_advertisements_and_redirects_of_pods_are_dropped(hosts: list[Host]) -> None:
    """An echo request on the same path passes."""
    a, b = [await host.pod(name, network="net") for name, host in zip("ab", hosts, strict=True)]
    assert await a.eventually_reaches(b, family=6)
    icmp = socket.getprotobyname("ipv6-icmp")
    with (
        b.namespace.open_socket(socket.AF_INET6, socket.SOCK_RAW, icmp) as listener,
        a.namespace.open_socket(socket.AF_INET6, socket.SOCK_RAW, icmp) as sender,
    ):
        listener.setblocking(False)
        sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
        for kind in (134, 137, 128):
            sender.sendto(struct.pack("!BBHI", kind, 0, 0, 0) + bytes(40), (str(b.address(6)), 0))
        kinds = set()
        while 128 not in kinds:
            packet = await receive(listener, within=30)
            assert packet is not None
            kinds.add(packet[0])
        assert not kinds & {134, 137}
