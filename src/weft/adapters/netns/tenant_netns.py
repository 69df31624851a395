"""A tenant's network space on this node: a namespace of its own, in which everything is ours.

Overlapping subnets and isolation between tenants come from the kernel itself. The namespace is pinned, so it outlives
the agent and its container; a process with no memory knows that what it finds in there is ours to keep or to remove.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import msgspec

from weft.adapters.netns.bridge.bridges import Bridges
from weft.adapters.netns.bridge.local_fdb import LocalFdb
from weft.adapters.netns.kernel_state import (
    ENTRY_PARTS,
    REAPED_GROUP,
    KernelState,
    facts_of,
    overlay_mac,
    overlay_name,
    port_forwardings,
    port_neighbours,
    port_routes,
    segment_name,
)
from weft.adapters.netns.nft.anti_spoofing import spoofguard_entries
from weft.adapters.netns.nft.base import SELF_SETS, VOICE_SETS
from weft.adapters.netns.nft.policy_chains import BRIDGE_PREFIX, DROP_GROUP, INSIDE, OVERLAY_PREFIX, PORT_PREFIX
from weft.adapters.netns.nft.service_maps import forget_stale, forget_untrue
from weft.adapters.netns.nft.table import ALL_SETS, SMALL_SETS, NftTable
from weft.adapters.netns.qos.qos import QosDriver
from weft.domain.addresses import Address
from weft.domain.desired.diff import Difference
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Overlay, Port, QosProfile, StateItem
from weft.domain.host_access.state import RemoteHostReturnRoute
from weft.domain.policy.policymap.policy_state import IpIdentity
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.conntrack import forget_endpoints
from weft.kernel.netlink.link import (
    LOOPBACK,
    Device,
    Link,
    Vxlan,
    alter_link,
    create_vxlan,
    delete_link,
    read_links,
    settle_link,
)
from weft.kernel.netlink.neigh import (
    drop_forwarding,
    drop_neighbour,
    put_forwarding,
    put_neighbour,
    read_forwardings,
    read_neighbours,
)
from weft.kernel.netlink.nflog import LoggedPacket, PacketLog
from weft.kernel.netlink.route import drop_address, drop_route, put_address, put_route, read_addresses, read_routes
from weft.kernel.netlink.socket import NETFILTER, ROUTE, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables

_LOOPBACKS = (Address(4, 0x7F000001), Address(6, 1))
_MOST_DATAGRAMS = 64

SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    # Nearly everything goes through: to look for a socket of ours first would cost every packet of both families.
    "net/ipv4/ip_early_demux": "0",
    # Between two networks each direction takes the overlay of its target, which a strict filter takes for a forgery.
    # Who may say what is decided at the ports.
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    # To look whether a source is an address of ours costs every packet, more so where there are rules for routing. At
    # ports such a source is refused anyway; from another node it is a gateway, which has something to say.
    "net/ipv4/conf/all/accept_local": "1",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    # What the table has not let in (`facts.HOP_MAC`) is not for this node either.
    "net/ipv4/conf/all/drop_unicast_in_l2_multicast": "1",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv6/conf/default/accept_ra": "0",
    "net/ipv6/conf/default/accept_dad": "0",
    "net/ipv6/conf/default/addr_gen_mode": "1",
}


class TenantNetnsDriver:
    """An open space. `prepare` brings it into its basic state, whatever it was in before."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.netlink = NetlinkSocket(ROUTE, namespace=namespace)
        self.netfilter = NetlinkSocket(NETFILTER, namespace=namespace)
        self.nftables = open_nftables(namespace)
        self.table = NftTable(netfilter=self.netfilter, nftables=self.nftables)
        self._shapes = QosDriver(netlink=self.netlink, netfilter=self.netfilter, nftables=self.nftables)
        self._segments = Bridges(namespace=namespace, netlink=self.netlink)
        self._own = LocalFdb()
        self.indexes: dict[str, int] = {}
        self._refused: PacketLog | None = None
        self._left: set[Address] = set()
        # The parts of `ENTRY_PARTS` that the table has if nobody else has changed it; None: that is not known.
        self._confirmed: set[StateItem] | None = None

    def close(self) -> None:
        if self._refused is not None:
            self._refused.close()
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
        if self.table.is_bridged:
            self._segments.show_packets()
        if not self.table.prepare():
            self._confirmed = None
        self.note_links()

    def note_links(self) -> None:
        """Know the devices that are there now."""
        self.indexes = {link.name: link.index for link in self.links()}

    def links(self) -> list[Link]:
        """The devices that are there to stay."""
        return [link for link in read_links(self.netlink) if link.group != REAPED_GROUP and link.index != LOOPBACK]

    def put_segment(self, segment: Segment, *, mtu: int) -> list[str]:
        """The bridge of a segment, guarded before anything passes it; what had to be mended about its ports."""
        if not self.table.is_bridged:
            self.table.bridge()
            self._shapes.bridge()
        return self._segments.put(segment, self.indexes, mtu=mtu)

    def drop_segment(self, segment: Segment) -> None:
        self._segments.drop(segment, self.indexes)

    def put_overlay(self, overlay: Overlay, underlay: NetlinkSocket, *, vtep: Address, port: int, mtu: int) -> None:
        """The device of an overlay: its packets leave through the underlay's namespace, it lives in this one."""
        name = overlay_name(overlay.vni)
        if name in self.indexes:
            return
        device = Device(name=name, mac=overlay_mac(vtep), mtu=mtu)
        tunnel = Vxlan(vni=overlay.vni, port=port, local=vtep)
        underlay.send_batch([create_vxlan(device, tunnel, namespace=self.namespace.fd)])
        self.indexes |= {link.name: link.index for link in self.links()}
        index = self.indexes[name]
        joining = self._segments.join(index, name, number=overlay.vni, indexes=self.indexes)
        self.netlink.send_batch([*joining, alter_link(index, up=True)])

    def drop_overlay(self, overlay: Overlay) -> None:
        index = self.indexes.pop(overlay_name(overlay.vni), None)
        if index is not None:
            self.netlink.send_batch([delete_link(index)])

    def change(self, *, drop: Sequence[StateItem], put: Sequence[StateItem]) -> None:
        """No more of what some parts are made of, and what others are made of, besides devices.

        Whoever arrives at an address inherits no connection of who was there before.
        """
        gone, new = (self._own.spared(facts_of(parts, self.indexes)) for parts in (drop, put))
        arriving = {part.address for part in put if isinstance(part, IpIdentity)}
        if not arriving.isdisjoint(self._left):
            self.forget_left()
        self._lead_home(put)
        self._add(new)
        with self._telling(drop=drop, put=put):
            self.table.change(drop=gone.entries, put=new.entries)
        forget_stale(self.netfilter, dropped=drop, put=put)
        self._shapes.apply(_shapes(put), _shapes(drop), self.indexes)
        self._remove(_minus(gone, new))
        self._left |= {part.address for part in drop if isinstance(part, IpIdentity)} - arriving

    def port_requests(self, port: Port, index: int) -> list[Request]:
        """What brings the host end of a port into service, once it is made with this index; nothing speaks yet."""
        indexes = {port.interface: index}
        treated: list[Request] = []
        if port.segment:
            bridge = segment_name(port.segment)
            indexes[bridge] = self.indexes[bridge]
            treated = [*self._segments.join(index, port.interface, number=port.segment, indexes=indexes)]
        return [
            *treated,
            alter_link(index, up=True),
            *map(put_neighbour, port_neighbours(port, indexes)),
            *map(put_route, port_routes(port, indexes)),
            *map(put_forwarding, port_forwardings(port, index)),
        ]

    def note_port(self, port: Port, index: int) -> None:
        """Know that the host end of a port is there."""
        self.indexes[port.interface] = index
        self._own.add(port, self.indexes)

    def activate_link(self, port: Port, index: int) -> None:
        """Let the devices of a port send at once; else the first packets to its workload are lost."""
        settle_link(self.netlink, index)
        if port.segment:
            settle_link(self.netlink, self.indexes[segment_name(port.segment)])

    def add_endpoint(self, ports: Sequence[Port], policy: Difference[StateItem]) -> None:
        """Let ports that are wired speak, and be spoken to, under their policy."""
        if not self._left.isdisjoint(address for port in ports for address in port.addresses):
            self.forget_left()
        gone, new = facts_of(policy.drop, self.indexes), facts_of(policy.put, self.indexes)
        self._shapes.apply(_shapes(policy.put), _shapes(policy.drop), self.indexes)
        with self._telling(drop=policy.drop, put=policy.put):
            self.table.change(drop=gone.entries, put=new.entries.union(*map(spoofguard_entries, ports)))
        forget_stale(self.netfilter, dropped=policy.drop, put=policy.put)

    @contextmanager
    def _telling(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> Iterator[None]:
        """What the table has for sure follows what it is told; when that fails, nothing is sure."""
        sure, self._confirmed = self._confirmed, None
        yield
        if sure is not None:
            sure.difference_update(drop)
            sure.update(part for part in put if isinstance(part, ENTRY_PARTS))
            self._confirmed = sure

    def dismiss(self, port: Port, policy: Difference[StateItem]) -> None:
        """Let a port speak no more; nobody inherits its connections.

        Those of v4 are forgotten at once. The kernel takes long to find those of v6, so that is left to `forget_left`.
        """
        self._own.discard(port, self.indexes)
        self.change(drop=[port, *policy.drop], put=policy.put)
        self._left |= set(port.addresses)
        fast = {address for address in self._left if address.family == 4}
        forget_endpoints(self.netfilter, fast)
        self._left -= fast

    def unshape(self, port: Port) -> None:
        """Take away what shaped a port that is gone."""
        self._shapes.clear(port.interface, self.indexes)

    def forget_left(self) -> None:
        """Forget the connections of addresses whose owners have left."""
        forget_endpoints(self.netfilter, self._left)
        self._left.clear()

    def open_drop_log(self) -> PacketLog:
        """From now on it is told what is refused here; `Refused` when somebody else hears that."""
        if self._refused is None:
            self._refused = PacketLog(DROP_GROUP, namespace=self.namespace)
        return self._refused

    def refused(self) -> list[LoggedPacket]:
        """The packets that were refused since the last call, or a sample; from `open_drop_log` or the first call on."""
        return list(self.open_drop_log().read(most=_MOST_DATAGRAMS))

    def converge(self, wanted: Set[StateItem], overlays: Sequence[Overlay]) -> tuple[list[str], frozenset[Port]]:
        """Mend what differs; what was mended, and the ports whose host ends are not there.

        What the table has for sure is not read back, which would take seconds where there are very many services.
        """
        if self.table.is_disturbed():
            self._confirmed = None
        self.table.settle()
        self.prepare()
        sure, self._confirmed = self._confirmed, None
        repaired: list[str] = []
        keep = {overlay_name(overlay.vni) for overlay in overlays}
        ports = [part for part in wanted if isinstance(part, Port)]
        keep |= {port.interface for port in ports}
        keep |= {segment_name(part.number) for part in wanted if isinstance(part, Segment)}
        for link in self.links():
            if link.name.startswith((OVERLAY_PREFIX, PORT_PREFIX, BRIDGE_PREFIX)) and link.name not in keep:
                repaired.append(f"removed device {link.name}")
                self.netlink.send_batch([alter_link(link.index, up=False, group=REAPED_GROUP)])
        members = {overlay_name(overlay.vni): overlay.vni for overlay in overlays}
        members |= {port.interface: port.segment for port in ports}
        repaired += self._segments.gather(members, self.indexes)
        repaired += [f"raised device {name}" for name in self._raise_all()]
        self._own = LocalFdb(ports, self.indexes)
        self.table.leads_home = False  # unless somebody is to be led there
        self._lead_home(wanted)
        wanted_facts, actual = self._compared(wanted, sure)
        missing, extra = _minus(wanted_facts, actual), _minus(actual, wanted_facts)
        self.table.ensure_lookup_rules(wanted_facts.entries, anew=sure is None)
        repaired += [f"added {fact}" for fact in _all(missing)] + [f"removed {fact}" for fact in _all(extra)]
        self._remove(extra)
        self._add(missing)
        self.table.change(drop=extra.entries, put=missing.entries)
        forget_untrue(self.netfilter, wanted, dropped=extra.entries)
        self._confirmed = {part for part in wanted if isinstance(part, ENTRY_PARTS)}
        repaired += self._shapes.converge(_shapes(wanted), self.indexes)
        absent = (part for part in wanted if isinstance(part, Port) and part.interface not in self.indexes)
        return repaired, frozenset(absent)

    def _compared(self, wanted: Set[StateItem], sure: set[StateItem] | None) -> tuple[KernelState, KernelState]:
        """What is wanted, and what is there, less what is wanted and there for sure."""
        if sure is None:
            return self._facts_of(wanted), self._read()
        settled, actual = sure & wanted, self._read(SMALL_SETS)
        others = facts_of(sure - settled, self.indexes).entries
        return self._facts_of(wanted - settled), msgspec.structs.replace(actual, entries=actual.entries | others)

    def _facts_of(self, wanted: Set[StateItem]) -> KernelState:
        """What everything is made of. Ports of this node come before news that have not caught up with them."""
        ports = {part for part in wanted if isinstance(part, Port)}
        others = self._own.spared(facts_of(wanted - ports, self.indexes))
        return _plus(facts_of(ports, self.indexes), others)

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
        missing = _minus(facts_of([port], self.indexes), self._read((*VOICE_SETS, *SELF_SETS)))
        return down + [f"{type(each).__name__.lower()} {each} is missing" for each in _all(missing)]

    def _read(self, sets: Sequence[str] = ALL_SETS) -> KernelState:
        ours = set(self.indexes.values())
        bridges = [index for name, index in self.indexes.items() if name.startswith(BRIDGE_PREFIX)]
        return KernelState(
            addresses=frozenset(
                each
                for link in (LOOPBACK, *bridges)
                for each in read_addresses(self.netlink, link=link)
                if each.prefix.address not in _LOOPBACKS
            ),
            routes=frozenset(read_routes(self.netlink)),
            neighbours=frozenset(each for each in read_neighbours(self.netlink) if each.link in ours),
            forwardings=frozenset(read_forwardings(self.netlink)),
            entries=self.table.read(sets),
        )

    def _lead_home(self, parts: Iterable[StateItem]) -> None:
        """Have answers to the hosts of other nodes find their way, where there are any."""
        if INSIDE in self.indexes and any(isinstance(part, RemoteHostReturnRoute) for part in parts):
            self.table.ensure_return_path()

    def _add(self, facts: KernelState) -> None:
        requests: list[Request] = [
            *map(put_address, facts.addresses),
            *map(put_neighbour, facts.neighbours),
            *map(put_forwarding, facts.forwardings),
            *map(put_route, facts.routes),
        ]
        if requests:
            self.netlink.send_batch(requests)

    def _remove(self, facts: KernelState) -> None:
        requests: list[Request] = [
            *map(drop_route, facts.routes),
            *map(drop_forwarding, facts.forwardings),
            *map(drop_neighbour, facts.neighbours),
            *map(drop_address, facts.addresses),
        ]
        if requests:
            self.netlink.send_batch(requests)


def _shapes(parts: Iterable[StateItem]) -> list[QosProfile]:
    return [part for part in parts if isinstance(part, QosProfile)]


def _plus(some: KernelState, others: KernelState) -> KernelState:
    return KernelState(*(getattr(some, name) | getattr(others, name) for name in KernelState.__struct_fields__))


def _minus(some: KernelState, others: KernelState) -> KernelState:
    return KernelState(*(getattr(some, name) - getattr(others, name) for name in KernelState.__struct_fields__))


def _all(facts: KernelState) -> Iterable[object]:
    return itertools.chain.from_iterable(getattr(facts, name) for name in KernelState.__struct_fields__)
