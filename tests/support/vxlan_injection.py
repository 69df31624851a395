"""Hosts and pods for attacks with crafted VXLAN packets, and a count of those that arrive."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from tests.support import inventory
from tests.support.connectivity import FAMILIES, SILENCE_S, assert_connectivity, between
from tests.support.flood import Tap
from tests.support.tenant_fixture import TenantFixture
from tests.support.vxlan import inner_frame, send_as_node, vxlan

from weft.adapters.netns.devices import overlay_hop_mac
from weft.domain.addresses import Address, parse_address
from weft.lab.hosts import Host, Pod

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
            mac = str(inventory.run_json(target.netns, "ip", "-j", "link", "show", "eth0")[0]["address"])
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
