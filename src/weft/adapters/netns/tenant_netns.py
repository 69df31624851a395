"""A tenant's network namespace on this node, in which everything is ours.

Overlapping subnets and isolation between tenants come from the kernel itself. The namespace is pinned, so it outlives
the agent and its container. A restarted agent knows that whatever it finds in there is its own to keep or to remove.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import msgspec

from weft.adapters.netns.bridges import Bridges
from weft.adapters.netns.devices import (
    BRIDGE_PREFIX,
    OVERLAY_PREFIX,
    PORT_PREFIX,
    REAPED_GROUP,
    TENANT_HOST_LINK,
    overlay_mac,
    overlay_name,
    segment_name,
)
from weft.adapters.netns.drop_reasons import NFLOG_GROUP
from weft.adapters.netns.kernel_state import (
    NFT_ONLY_ITEMS,
    KernelState,
    kernel_state_of,
    port_fdb_entries,
    port_neighbours,
    port_routes,
)
from weft.adapters.netns.nft.anti_spoofing import spoofguard_entries
from weft.adapters.netns.nft.entries import HAIRPIN_SELF_SETS, L3_SPOOFGUARD_SETS
from weft.adapters.netns.nft.service_maps import flush_stale_connections, flush_unwanted_connections
from weft.adapters.netns.nft.table import ALL_SETS, SMALL_SETS, NftTable
from weft.adapters.netns.qos import QosDriver
from weft.domain.addresses import Address
from weft.domain.desired.diff import Difference
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Overlay, Port, QosProfile, StateItem
from weft.domain.host_access.state import RemoteHostReturnRoute
from weft.domain.policy.policymap.policy_state import IpIdentity
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.conntrack import flush_addresses
from weft.kernel.netlink.link import (
    LOOPBACK_IFINDEX,
    Device,
    Link,
    Vxlan,
    change_link,
    create_vxlan,
    delete_link,
    read_link,
    read_links,
    update_carrier,
)
from weft.kernel.netlink.neigh import (
    drop_fdb_entry,
    drop_neighbour,
    put_fdb_entry,
    put_neighbour,
    read_fdb,
    read_neighbours,
)
from weft.kernel.netlink.nflog import LoggedPacket, PacketLog
from weft.kernel.netlink.route import drop_address, drop_route, put_address, put_route, read_addresses, read_routes
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables
from weft.kernel.uapi.netlink import NETLINK_NETFILTER, NETLINK_ROUTE

_LOOPBACKS = (Address(4, 0x7F000001), Address(6, 1))
# Bounds the work of one call under a flood of drops.
_MAX_LOG_DATAGRAMS = 64

SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    # Nearly all packets are forwarded, so looking for a local socket first would only cost time.
    "net/ipv4/ip_early_demux": "0",
    # Between two networks each direction uses the overlay of its destination: asymmetric routing, which strict reverse
    # path filtering would drop. The `spoofguard` chain checks sources.
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    # Skips a route lookup per packet. `spoofguard` drops local source addresses from ports; from another node such an
    # address is a gateway, whose ICMP errors are wanted.
    "net/ipv4/conf/all/accept_local": "1",
    "net/ipv4/conf/all/send_redirects": "0",
    "net/ipv4/conf/default/send_redirects": "0",
    # Packets to a multicast MAC that `spoofguard` has not accepted (`devices.HOP_MAC`) are not for this node either.
    "net/ipv4/conf/all/drop_unicast_in_l2_multicast": "1",
    "net/ipv6/conf/all/forwarding": "1",
    "net/ipv6/conf/default/accept_ra": "0",
    # Addresses are assigned by us, so duplicate address detection would only delay the first packet.
    "net/ipv6/conf/default/accept_dad": "0",
    # No link-local addresses of the kernel's own making.
    "net/ipv6/conf/default/addr_gen_mode": "1",
}


class LocalFdb:
    """The MACs and addresses of local workloads on bridges, whose kernel objects win over outdated remote state.

    A workload may start on this node before the news arrives that another node has given up its address. An item about
    a remote workload with the same MAC or address neither replaces nor deletes the objects of the local one.
    """

    def __init__(self, ports: Iterable[Port] = (), indexes: Mapping[str, int] | None = None) -> None:
        self._macs: set[str] = set()
        self._addresses: set[tuple[int, Address]] = set()
        for port in ports:
            self.add(port, indexes or {})

    def add(self, port: Port, indexes: Mapping[str, int]) -> None:
        if port.segment:
            self._macs.add(port.mac)
            self._addresses |= _bridge_addresses(port, indexes)

    def discard(self, port: Port, indexes: Mapping[str, int]) -> None:
        if port.segment:
            self._macs.discard(port.mac)
            self._addresses -= _bridge_addresses(port, indexes)

    def without_local(self, state: KernelState) -> KernelState:
        """Return the state without objects that concern local workloads."""
        if not self._macs:
            return state
        return msgspec.structs.replace(
            state,
            routes=frozenset(each for each in state.routes if (each.link, each.to.address) not in self._addresses),
            neighbours=frozenset(each for each in state.neighbours if (each.link, each.address) not in self._addresses),
            # Entries of the VXLAN device's own FDB (`remote`) may stay: the bridge does not send there.
            fdb_entries=frozenset(each for each in state.fdb_entries if each.remote or each.mac not in self._macs),
        )


def _bridge_addresses(port: Port, indexes: Mapping[str, int]) -> set[tuple[int, Address]]:
    bridge = indexes.get(segment_name(port.segment), 0)
    return {(bridge, address) for address in port.addresses}


class TenantNetnsDriver:
    """An open tenant netns. `prepare` brings it into its basic state, whatever it was in before."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.netlink = NetlinkSocket(NETLINK_ROUTE, namespace=namespace)
        self.netfilter = NetlinkSocket(NETLINK_NETFILTER, namespace=namespace)
        self.nftables = open_nftables(namespace)
        self.table = NftTable(netfilter=self.netfilter, nftables=self.nftables)
        self._qos = QosDriver(netlink=self.netlink, netfilter=self.netfilter, nftables=self.nftables)
        self._bridges = Bridges(namespace=namespace, netlink=self.netlink)
        self._local_fdb = LocalFdb()
        # Interface indexes by name.
        self.indexes: dict[str, int] = {}
        self._drop_log: PacketLog | None = None
        # Addresses of removed endpoints whose conntrack entries are not flushed yet.
        self._stale_addresses: set[Address] = set()
        # The items of `NFT_ONLY_ITEMS` that the table holds, unless somebody else has changed it; None: unknown.
        self._confirmed: set[StateItem] | None = None

    def close(self) -> None:
        if self._drop_log is not None:
            self._drop_log.close()
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
        """Enable forwarding, set loopback up, and create or update the nft tables."""
        self.namespace.write_sysctls(SYSCTLS)
        self.netlink.send_batch([change_link(LOOPBACK_IFINDEX, up=True)])
        if self.table.has_bridge_filter:
            self._bridges.enable_br_netfilter()
        if not self.table.prepare():
            self._confirmed = None
        self.refresh_links()

    def refresh_links(self) -> None:
        """Read the interface indexes."""
        self.indexes = {link.name: link.index for link in self.links()}

    def links(self) -> list[Link]:
        """Read the devices, except loopback and those that wait for deletion."""
        return [
            link for link in read_links(self.netlink) if link.group != REAPED_GROUP and link.index != LOOPBACK_IFINDEX
        ]

    def put_segment(self, segment: Segment, *, mtu: int) -> list[str]:
        """Ensure the bridge of a segment; return the repairs of its ports."""
        # The filter comes before the bridge, so that no frame goes unfiltered.
        if not self.table.has_bridge_filter:
            self.table.ensure_bridge_filter()
            self._qos.use_bridge_table()
        return self._bridges.put(segment, self.indexes, mtu=mtu)

    def drop_segment(self, segment: Segment) -> None:
        self._bridges.drop(segment, self.indexes)

    def put_overlay(self, overlay: Overlay, underlay: NetlinkSocket, *, vtep: Address, port: int, mtu: int) -> bool:
        """Ensure the VXLAN device of an overlay; return whether it replaces one of other settings."""
        name = overlay_name(overlay.vni)
        tunnel = Vxlan(vni=overlay.vni, port=port, local=vtep)
        former = read_link(self.netlink, name) if name in self.indexes else None
        if former is not None:
            if former.vxlan == tunnel:
                return False
            # Of an agent with another `--vtep-ip` or `--vxlan-port`: other nodes would drop its packets.
            self.netlink.send_batch([delete_link(former.index)])
        device = Device(name=name, mac=overlay_mac(vtep), mtu=mtu)
        # Created from the underlay's netns: a VXLAN device sends by the netns it was created in, wherever it is.
        underlay.send_batch([create_vxlan(device, tunnel, namespace=self.namespace.fd)])
        self.indexes |= {link.name: link.index for link in self.links()}
        index = self.indexes[name]
        joining = self._bridges.join(index, name, number=overlay.vni, indexes=self.indexes)
        self.netlink.send_batch([*joining, change_link(index, up=True)])
        return former is not None

    def drop_overlay(self, overlay: Overlay) -> None:
        index = self.indexes.pop(overlay_name(overlay.vni), None)
        if index is not None:
            self.netlink.send_batch([delete_link(index)])

    def change(self, *, drop: Sequence[StateItem], put: Sequence[StateItem]) -> None:
        """Remove the kernel objects of some state items and create those of others, except devices.

        A workload with the address of a removed one inherits none of its connections.
        """
        gone, new = (self._local_fdb.without_local(kernel_state_of(items, self.indexes)) for items in (drop, put))
        arriving = {item.address for item in put if isinstance(item, IpIdentity)}
        if not arriving.isdisjoint(self._stale_addresses):
            self.flush_stale_addresses()
        self._ensure_return_path(put)
        # Routes and neighbours exist before the table allows packets, and go after it denies them.
        self._add(new)
        with self._tracking_confirmed(drop=drop, put=put):
            self.table.change(drop=gone.entries, put=new.entries)
        flush_stale_connections(self.netfilter, dropped=drop, put=put)
        self._qos.apply(_profiles(put), _profiles(drop), self.indexes)
        self._remove(_minus(gone, new))
        self._stale_addresses |= {item.address for item in drop if isinstance(item, IpIdentity)} - arriving

    def port_requests(self, port: Port, index: int) -> list[Request]:
        """Return the requests that configure the host end of a port, once it is created. It cannot send yet."""
        indexes = {port.interface: index}
        joining: list[Request] = []
        if port.segment:
            bridge = segment_name(port.segment)
            indexes[bridge] = self.indexes[bridge]
            joining = [*self._bridges.join(index, port.interface, number=port.segment, indexes=indexes)]
        return [
            *joining,
            change_link(index, up=True),
            *map(put_neighbour, port_neighbours(port, indexes)),
            *map(put_route, port_routes(port, indexes)),
            *map(put_fdb_entry, port_fdb_entries(port, index)),
        ]

    def register_port(self, port: Port, index: int) -> None:
        """Note that the host end of a port exists."""
        self.indexes[port.interface] = index
        self._local_fdb.add(port, self.indexes)

    def activate_link(self, port: Port, index: int) -> None:
        """Let the devices of a port send at once."""
        # The kernel updates the carrier state up to a second later; until then it would drop packets to the workload.
        update_carrier(self.netlink, index)
        if port.segment:
            update_carrier(self.netlink, self.indexes[segment_name(port.segment)])

    def add_endpoint(self, ports: Sequence[Port], policy: Difference[StateItem]) -> None:
        """Allow configured ports to send and receive, under their policy, in one transaction."""
        if not self._stale_addresses.isdisjoint(address for port in ports for address in port.addresses):
            self.flush_stale_addresses()
        gone, new = kernel_state_of(policy.drop, self.indexes), kernel_state_of(policy.put, self.indexes)
        # Limits come first: no packet is sent without them.
        self._qos.apply(_profiles(policy.put), _profiles(policy.drop), self.indexes)
        with self._tracking_confirmed(drop=policy.drop, put=policy.put):
            self.table.change(drop=gone.entries, put=new.entries.union(*map(spoofguard_entries, ports)))
        flush_stale_connections(self.netfilter, dropped=policy.drop, put=policy.put)

    @contextmanager
    def _tracking_confirmed(self, *, drop: Iterable[StateItem], put: Iterable[StateItem]) -> Iterator[None]:
        """Keep `_confirmed` in step with a change of the table. If the change fails, the content is unknown."""
        confirmed, self._confirmed = self._confirmed, None
        yield
        if confirmed is not None:
            confirmed.difference_update(drop)
            confirmed.update(item for item in put if isinstance(item, NFT_ONLY_ITEMS))
            self._confirmed = confirmed

    def remove_endpoint(self, port: Port, policy: Difference[StateItem]) -> None:
        """Stop a port from sending and receiving, and flush its connections.

        v4 connections are flushed at once. Finding v6 ones takes the kernel long, so they wait for
        `flush_stale_addresses`.
        """
        self._local_fdb.discard(port, self.indexes)
        self.change(drop=[port, *policy.drop], put=policy.put)
        self._stale_addresses |= set(port.addresses)
        v4 = {address for address in self._stale_addresses if address.family == 4}
        flush_addresses(self.netfilter, v4)
        self._stale_addresses -= v4

    def clear_qos(self, port: Port) -> None:
        """Remove the QoS of a port that is gone."""
        self._qos.clear(port.interface, self.indexes)

    def flush_stale_addresses(self) -> None:
        """Delete the conntrack entries of the addresses of removed endpoints."""
        flush_addresses(self.netfilter, self._stale_addresses)
        self._stale_addresses.clear()

    def open_drop_log(self) -> PacketLog:
        """Bind the nflog group of drops; `NetlinkError` if another process has bound it."""
        if self._drop_log is None:
            self._drop_log = PacketLog(NFLOG_GROUP, namespace=self.namespace)
        return self._drop_log

    def read_drop_log(self) -> list[LoggedPacket]:
        """Read the packets dropped since the last call, or a sample of them. The first call binds the group."""
        return list(self.open_drop_log().read(most=_MAX_LOG_DATAGRAMS))

    def converge(
        self, wanted: Set[StateItem], overlays: Sequence[Overlay], *, keep_unknown: bool = False
    ) -> tuple[list[str], frozenset[Port]]:
        """Repair what differs; return the repairs, and the ports whose host ends do not exist.

        Confirmed nft entries are not read back: with very many services that would take seconds.
        """
        if self.table.has_drifted():
            self._confirmed = None
        self.table.note_generation()
        self.prepare()
        confirmed, self._confirmed = self._confirmed, None
        ports = [item for item in wanted if isinstance(item, Port)]
        repaired = self._remove_devices(wanted, overlays, ports, keep_unknown=keep_unknown)
        members = {overlay_name(overlay.vni): overlay.vni for overlay in overlays}
        members |= {port.interface: port.segment for port in ports}
        repaired += self._bridges.repair_members(members, self.indexes)
        repaired += [f"set device {name} up" for name in self._set_all_up()]
        self._local_fdb = LocalFdb(ports, self.indexes)
        # False unless an item needs it: then `read` skips the maps of an unused table.
        self.table.has_return_path = False
        self._ensure_return_path(wanted)
        desired, actual = self._read_unconfirmed(wanted, confirmed)
        missing, extra = _minus(desired, actual), _minus(actual, desired)
        self.table.ensure_lookup_rules(desired.entries, rebuild=confirmed is None)
        repaired += [f"added {each}" for each in _all(missing)] + [f"removed {each}" for each in _all(extra)]
        # Removals first: an extra object may have the key of a missing one.
        self._remove(extra)
        self._add(missing)
        self.table.change(drop=extra.entries, put=missing.entries)
        if confirmed is None:
            self.table.delete_unused_selectors()
        flush_unwanted_connections(self.netfilter, wanted, dropped=extra.entries)
        self._confirmed = {item for item in wanted if isinstance(item, NFT_ONLY_ITEMS)}
        repaired += self._qos.converge(_profiles(wanted), self.indexes)
        return repaired, frozenset(port for port in ports if port.interface not in self.indexes)

    def _remove_devices(
        self, wanted: Set[StateItem], overlays: Sequence[Overlay], ports: Sequence[Port], *, keep_unknown: bool
    ) -> list[str]:
        """Hand devices that nothing needs to the reaper; return the repairs."""
        keep = {overlay_name(overlay.vni) for overlay in overlays}
        keep |= {port.interface for port in ports}
        keep |= {segment_name(item.number) for item in wanted if isinstance(item, Segment)}
        removable = (OVERLAY_PREFIX, BRIDGE_PREFIX) if keep_unknown else (OVERLAY_PREFIX, PORT_PREFIX, BRIDGE_PREFIX)
        removed = []
        for link in self.links():
            if link.name.startswith(removable) and link.name not in keep:
                removed.append(f"removed device {link.name}")
                self.netlink.send_batch([change_link(link.index, up=False, group=REAPED_GROUP)])
        return removed

    def _read_unconfirmed(
        self, wanted: Set[StateItem], confirmed: set[StateItem] | None
    ) -> tuple[KernelState, KernelState]:
        """Return the desired and the actual state, both without what is wanted and confirmed."""
        if confirmed is None:
            return self._desired(wanted), self._read()
        unchanged, actual = confirmed & wanted, self._read(SMALL_SETS)
        unwanted = kernel_state_of(confirmed - unchanged, self.indexes).entries
        actual = msgspec.structs.replace(actual, entries=actual.entries | unwanted)
        return self._desired(wanted - unchanged), actual

    def _desired(self, wanted: Set[StateItem]) -> KernelState:
        """Return the kernel objects of all items. Local ports win over outdated items about remote workloads."""
        ports = {item for item in wanted if isinstance(item, Port)}
        others = self._local_fdb.without_local(kernel_state_of(wanted - ports, self.indexes))
        return _plus(kernel_state_of(ports, self.indexes), others)

    def _set_all_up(self) -> list[str]:
        """Set every device up; return those that were down. The kernel keeps no routes over a device that is down."""
        links = self.links()
        self.indexes = {link.name: link.index for link in links}
        down = [link for link in links if not link.up]
        self.netlink.send_batch([change_link(link.index, up=True) for link in down])
        return [link.name for link in down]

    def differences(self, port: Port) -> list[str]:
        """Describe what a port lacks on our side."""
        link = next((link for link in self.links() if link.name == port.interface), None)
        if link is None:
            return [f"host end {port.interface} is missing"]
        down = [] if link.up else [f"host end {port.interface} is down"]
        actual = self._read((*L3_SPOOFGUARD_SETS, *HAIRPIN_SELF_SETS))
        missing = _minus(kernel_state_of([port], self.indexes), actual)
        return down + [f"{type(each).__name__.lower()} {each} is missing" for each in _all(missing)]

    def _read(self, sets: Sequence[str] = ALL_SETS) -> KernelState:
        ours = set(self.indexes.values())
        bridges = [index for name, index in self.indexes.items() if name.startswith(BRIDGE_PREFIX)]
        return KernelState(
            addresses=frozenset(
                each
                for link in (LOOPBACK_IFINDEX, *bridges)
                for each in read_addresses(self.netlink, link=link)
                if each.prefix.address not in _LOOPBACKS
            ),
            routes=frozenset(read_routes(self.netlink)),
            # Neighbours of devices that wait for deletion are none of ours.
            neighbours=frozenset(each for each in read_neighbours(self.netlink) if each.link in ours),
            fdb_entries=frozenset(read_fdb(self.netlink)),
            entries=self.table.read(sets),
        )

    def _ensure_return_path(self, items: Iterable[StateItem]) -> None:
        """Create the netdev table if any of the items needs it. Without the link there is nothing to hook."""
        if TENANT_HOST_LINK in self.indexes and any(isinstance(item, RemoteHostReturnRoute) for item in items):
            self.table.ensure_return_path()

    def _add(self, state: KernelState) -> None:
        # Routes come last: their next hops must be reachable.
        requests: list[Request] = [
            *map(put_address, state.addresses),
            *map(put_neighbour, state.neighbours),
            *map(put_fdb_entry, state.fdb_entries),
            *map(put_route, state.routes),
        ]
        if requests:
            self.netlink.send_batch(requests)

    def _remove(self, state: KernelState) -> None:
        requests: list[Request] = [
            *map(drop_route, state.routes),
            *map(drop_fdb_entry, state.fdb_entries),
            *map(drop_neighbour, state.neighbours),
            *map(drop_address, state.addresses),
        ]
        if requests:
            self.netlink.send_batch(requests)


def _profiles(items: Iterable[StateItem]) -> list[QosProfile]:
    return [item for item in items if isinstance(item, QosProfile)]


def _plus(left: KernelState, right: KernelState) -> KernelState:
    return KernelState(*(getattr(left, name) | getattr(right, name) for name in KernelState.__struct_fields__))


def _minus(left: KernelState, right: KernelState) -> KernelState:
    return KernelState(*(getattr(left, name) - getattr(right, name) for name in KernelState.__struct_fields__))


def _all(state: KernelState) -> Iterable[object]:
    return itertools.chain.from_iterable(getattr(state, name) for name in KernelState.__struct_fields__)
