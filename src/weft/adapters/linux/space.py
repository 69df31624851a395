"""A tenant's network space on this node: a namespace of its own, in which everything is ours.

Overlapping subnets and isolation between tenants come from the kernel itself. The namespace is pinned, so it outlives
the agent and its container; a process with no memory knows that what it finds in there is ours to keep or to remove.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Iterable, Sequence, Set
from types import TracebackType
from typing import Self

from weft.adapters.linux.elements import apply_changes
from weft.adapters.linux.facts import OVERLAY_PREFIX, Facts, facts_of, overlay_mac, overlay_name
from weft.adapters.linux.links import LOOPBACK, Device, Link, Vxlan, alter_link, create_vxlan, delete_link, read_links
from weft.adapters.linux.neighbours import (
    drop_forwarding,
    drop_neighbour,
    put_forwarding,
    put_neighbour,
    read_forwardings,
    read_neighbours,
)
from weft.adapters.linux.netlink import NETFILTER, ROUTE, NetlinkSocket, Refused
from weft.adapters.linux.netns import Namespace
from weft.adapters.linux.nftables import open_nftables
from weft.adapters.linux.routes import drop_address, drop_route, put_address, put_route, read_addresses, read_routes
from weft.adapters.linux.ruleset import BASE, PORT_PREFIX, Voice, drop_voices, put_voices, read_voices
from weft.adapters.linux.wire import Request
from weft.domain.addresses import Address
from weft.domain.nodeview import Overlay, Part, Port

REAPED_GROUP = 87
"""The group of devices that are as good as gone."""

_LOOPBACKS = (Address(4, 0x7F000001), Address(6, 1))

SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    # Between two networks each direction takes the overlay of its target, which a strict filter takes for a forgery.
    # Who may say what is decided at the ports.
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv6/conf/default/accept_ra": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv6/conf/default/addr_gen_mode": "1",
}


class TenantSpace:
    """An open space. `prepare` brings it into its basic state, whatever it was in before."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.netlink = NetlinkSocket(ROUTE, namespace=namespace)
        self.netfilter = NetlinkSocket(NETFILTER, namespace=namespace)
        self.nftables = open_nftables(namespace)
        self.indexes: dict[str, int] = {}

    def close(self) -> None:
        self.nftables.close()
        self.netfilter.close()
        self.netlink.close()
        self.namespace.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def prepare(self) -> None:
        """Forwarding on, loopback up, and the table that lets no port speak for another."""
        self.namespace.write_sysctls(SYSCTLS)
        self.netlink.send_batch([alter_link(LOOPBACK, up=True)])
        self.nftables.run(BASE)
        self.indexes = {link.name: link.index for link in self.links()}

    def links(self) -> list[Link]:
        """The devices that are there to stay."""
        return [link for link in read_links(self.netlink) if link.group != REAPED_GROUP and link.index != LOOPBACK]

    def put_overlay(self, overlay: Overlay, underlay: NetlinkSocket, *, vtep: Address, port: int, mtu: int) -> None:
        """The device of an overlay: its packets leave through the underlay's namespace, it lives in this one."""
        name = overlay_name(overlay.vni)
        if name in self.indexes:
            return
        device = Device(name=name, mac=overlay_mac(vtep), mtu=mtu)
        tunnel = Vxlan(vni=overlay.vni, port=port, local=vtep)
        underlay.send_batch([create_vxlan(device, tunnel, namespace=self.namespace.fd)])
        self.indexes |= {link.name: link.index for link in self.links()}
        self.netlink.send_batch([alter_link(self.indexes[name], up=True)])

    def drop_overlay(self, overlay: Overlay) -> None:
        index = self.indexes.pop(overlay_name(overlay.vni), None)
        if index is not None:
            self.netlink.send_batch([delete_link(index)])

    def put(self, parts: Iterable[Part]) -> None:
        """What the parts are made of, besides devices."""
        self._add(facts_of(parts, self.indexes))

    def drop(self, parts: Iterable[Part]) -> None:
        """No more of what the parts are made of, besides devices."""
        self._remove(facts_of(parts, self.indexes))

    def converge(self, wanted: Set[Part], overlays: Sequence[Overlay]) -> tuple[list[str], frozenset[Port]]:
        """Mend what differs; what was mended, and the ports whose host ends are not there."""
        self.prepare()
        mended: list[str] = []
        keep = {overlay_name(overlay.vni) for overlay in overlays}
        keep |= {part.interface for part in wanted if isinstance(part, Port)}
        for link in self.links():
            if link.name.startswith((OVERLAY_PREFIX, PORT_PREFIX)) and link.name not in keep:
                mended.append(f"removed device {link.name}")
                self.netlink.send_batch([alter_link(link.index, up=False, group=REAPED_GROUP)])
        mended += [f"raised device {name}" for name in self._raise_all()]
        wanted_facts, actual = facts_of(wanted, self.indexes), self._read()
        missing, extra = _minus(wanted_facts, actual), _minus(actual, wanted_facts)
        mended += [f"added {fact}" for fact in _all(missing)] + [f"removed {fact}" for fact in _all(extra)]
        self._remove(extra)
        self._add(missing)
        absent = (part for part in wanted if isinstance(part, Port) and part.interface not in self.indexes)
        return mended, frozenset(absent)

    def _raise_all(self) -> list[str]:
        """Every device is up before anything is said about it: the kernel has no routes over one that is down."""
        links = self.links()
        self.indexes = {link.name: link.index for link in links}
        down = [link for link in links if not link.up]
        self.netlink.send_batch([alter_link(link.index, up=True) for link in down])
        return [link.name for link in down]

    def differences(self, port: Port) -> list[str]:
        """What a port lacks on our side, in words."""
        link = next((link for link in self.links() if link.name == port.interface), None)
        if link is None:
            return [f"host end {port.interface} is missing"]
        down = [] if link.up else [f"host end {port.interface} is down"]
        missing = _minus(facts_of([port], {port.interface: link.index}), self._read())
        return down + [f"{type(each).__name__.lower()} {each} is missing" for each in _all(missing)]

    def _read(self) -> Facts:
        ours = set(self.indexes.values())
        return Facts(
            addresses=frozenset(
                each for each in read_addresses(self.netlink, link=LOOPBACK) if each.prefix.address not in _LOOPBACKS
            ),
            routes=frozenset(read_routes(self.netlink)),
            neighbours=frozenset(each for each in read_neighbours(self.netlink) if each.link in ours),
            forwardings=frozenset(each for each in read_forwardings(self.netlink) if each.remote),
            voices=self._voices(),
        )

    def _voices(self) -> frozenset[Voice]:
        try:
            return frozenset(read_voices(self.netfilter))
        except Refused as refusal:
            if refusal.errno != errno.ENOENT:
                raise
            return frozenset()  # somebody took the whole table away

    def _add(self, facts: Facts) -> None:
        requests: list[Request] = [
            *map(put_address, facts.addresses),
            *map(put_neighbour, facts.neighbours),
            *map(put_forwarding, facts.forwardings),
            *map(put_route, facts.routes),
        ]
        if requests:
            self.netlink.send_batch(requests)
        if facts.voices:
            apply_changes(self.netfilter, put_voices(facts.voices))

    def _remove(self, facts: Facts) -> None:
        self._silence(facts.voices)
        requests: list[Request] = [
            *map(drop_route, facts.routes),
            *map(drop_forwarding, facts.forwardings),
            *map(drop_neighbour, facts.neighbours),
            *map(drop_address, facts.addresses),
        ]
        if requests:
            self.netlink.send_batch(requests)

    def _silence(self, voices: frozenset[Voice]) -> None:
        """None of these speak any more, also where somebody has taken a part of them away."""
        try:
            apply_changes(self.netfilter, drop_voices(voices))
        except Refused as refusal:
            if refusal.errno != errno.ENOENT:
                raise
            apply_changes(self.netfilter, drop_voices(voices & self._voices()))


def _minus(some: Facts, others: Facts) -> Facts:
    return Facts(*(getattr(some, name) - getattr(others, name) for name in Facts.__struct_fields__))


def _all(facts: Facts) -> Iterable[object]:
    return itertools.chain.from_iterable(getattr(facts, name) for name in Facts.__struct_fields__)
