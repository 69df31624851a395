"""Hosts and pods for attacks with crafted VXLAN packets, and a count of those that arrive."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support import inventory
from tests.support.connectivity import FAMILIES, SILENCE_S, assert_connectivity, between
from tests.support.flood import Tap
from tests.support.tenant_fixture import TenantFixture
from tests.support.vxlan import inner_frame, link_mac, send_as_node, vxlan

from weft.adapters.netns.devices import overlay_hop_mac
from weft.domain.addresses import Address, parse_address
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.lab.hosts import Host, Pod
from weft.lab.traffic import UDP, NetnsAddress
from weft.lab.waiting import DEADLINE

PORT = 6000
DENIED = "-d in -p 1 -j deny"
# Addresses in the subnets of the tenant that no pod has.
NOBODY = {4: parse_address("10.1.77.77", field="source"), 6: parse_address("2001:db8:1::7777", field="source")}


class Scene:
    """A tenant with an open and a closed pod on the first host, and a pod on each of the others."""

    def __init__(self, testbed: TenantFixture, hosts: Sequence[Host], vteps: Mapping[str, str] | None = None) -> None:
        self.testbed, self.lab = testbed, testbed.lab
        self.one, self.two, self.three = hosts
        # VTEP addresses by host, where they are not the hosts' IPv4 addresses.
        self._vteps = vteps or {}
        self.vni = 0

    def vtep(self, host: Host) -> str:
        return self._vteps.get(host.name, host.address)

    def as_node(self, source: Host) -> Callable[[bytes], None]:
        """An attack by a compromised node on the first host."""
        return partial(send_as_node, source, self.one, outer=(self.vtep(source), self.vtep(self.one)))

    async def build(self) -> None:
        await self.testbed.group("friend")
        await self.testbed.policy("closed", DENIED, "-d in -g friend -p 2 -j allow")
        await self.testbed.group("closed", "closed")
        self.open = await self.testbed.pod(self.one)
        self.closed = await self.testbed.pod(self.one, "closed")
        self.near, self.friend_two, self.friend_three = [
            await self.testbed.pod(host, "friend") for host in (self.one, self.two, self.three)
        ]
        self.vni = (await self.lab.rest.oper("networks", f"{self.testbed.tenant}:net"))["externalPktTag"]
        await assert_connectivity(
            allowed=between([self.near, self.friend_two, self.friend_three], [self.open, self.closed], "udp/53")
        )

    def payload(self, source: Address, target: Pod) -> bytes:
        """A VXLAN packet with a datagram of a source to a pod on the first host."""
        mac = overlay_hop_mac(parse_address(self.vtep(self.one), field="vtep"))
        if self.lab.fwdmode == "bridge":
            mac = link_mac(target.netns)
        return vxlan(self.vni, inner_frame(mac, source, address_of(target, source.family), port=PORT))

    async def arrived(self, attack: Callable[[bytes], None], sources: Iterable[Address], *targets: Pod) -> list[str]:
        """The datagrams that arrive at the pods after an attack with each inner source."""
        with ExitStack() as closing:
            taps = {target.name: closing.enter_context(Tap(target.namespace)) for target in targets}
            for source, target in itertools.product(sources, targets):
                await asyncio.to_thread(attack, self.payload(source, target))
            # A fixed observation window: the absence of a packet is no event to wait for.
            await asyncio.sleep(SILENCE_S)
            return [
                f"{packet.source} at {name}"
                for name, tap in taps.items()
                for packet in tap.packets()
                if packet.target_port == PORT
            ]

    def sources(self) -> list[Address]:
        """Inner sources to try: unused addresses, and those of pods that policy allows, also of the first host."""
        pods = (self.near, self.friend_two, self.friend_three)
        return [*NOBODY.values(), *(address_of(pod, family) for pod, family in itertools.product(pods, FAMILIES))]


def address_of(pod: Pod, family: int) -> Address:
    return parse_address(str(pod.address(family)), field="address")


class Container:
    """A container of another runtime on a host: a netns behind a veth, with forwarding and NAT, as Docker makes them.

    The host does not filter reverse paths meanwhile: many do not.
    """

    ADDRESS, GATEWAY = "172.31.9.2", "172.31.9.1"
    _SETUP = (
        "ip link add docker0 type veth peer name eth0 netns {netns}",
        f"ip addr add {GATEWAY}/24 dev docker0",
        "ip link set docker0 up",
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.docker0.rp_filter=0",
        "nft add table ip docker",
        "nft add chain ip docker nat {{ type nat hook postrouting priority srcnat; }}",
        "nft add rule ip docker nat ip saddr 172.31.9.0/24 oifname != docker0 masquerade",
    )
    _INSIDE = (
        f"ip addr add {ADDRESS}/24 dev eth0",
        "ip link set eth0 up",
        f"ip route add default via {GATEWAY}",
    )
    _CLEANUP = (
        "ip link del docker0",
        "nft delete table ip docker",
        "sysctl -qw net.ipv4.conf.all.rp_filter=1",
    )
    _OTHER_PORT = 4790

    def __init__(self, host: Host) -> None:
        self._host = host
        self._directory = NamespaceDirectory(host.home / "containers")
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._directory.prepare()
        self.namespace = self._closing.enter_context(self._directory.create("docker"))
        self._closing.callback(self._directory.delete, "docker")
        self._closing.callback(self._run, self._CLEANUP)
        netns = self._directory.path / "docker"
        self._run(self._SETUP, netns=netns)
        for command in self._INSIDE:
            inventory.run(netns, command)
        self.macs = link_mac(self._host.netns, "docker0"), link_mac(netns)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()

    async def reaches(self, host: Host) -> bool:
        """Whether a datagram to another port of a host arrives there as one of the container's host."""
        with Namespace.open(host.netns) as namespace:
            target = NetnsAddress(namespace, ip_address(host.address))
            sender = NetnsAddress(self.namespace, ip_address(self.ADDRESS))
            with target.listening(self._OTHER_PORT, UDP) as listener, sender.open_socket(UDP) as client:
                client.sendto(b"?", (host.address, self._OTHER_PORT))
                async with asyncio.timeout(DEADLINE):
                    _, (seen, *_) = await asyncio.get_running_loop().sock_recvfrom(listener, 64)
                return str(seen) == self._host.address

    def _run(self, commands: Iterable[str], *, netns: Path | None = None) -> None:
        for command in commands:
            inventory.run(self._host.netns, command.format(netns=netns))
