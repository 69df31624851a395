"""The `Datapath` on the plain Linux kernel (ADR 6): a netns per tenant, with veth, VXLAN, bridges and nftables.

Everything here blocks and belongs to one thread at a time: the agent has a worker thread for kernel work.
"""

from __future__ import annotations

import errno
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from weft.adapters.netns import pod_netns
from weft.adapters.netns.devices import DELETED_POD_LINK_PREFIX, PORT_MAC, REAPED_GROUP, overlay_name
from weft.adapters.netns.diagnostics import KernelTools, read_drops, read_verdict_counters, survey_tenant_netns
from weft.adapters.netns.host.network import HostNetwork
from weft.adapters.netns.host.ruleset import HostConfig
from weft.adapters.netns.host.vtep_guard import VtepGuard
from weft.adapters.netns.host.vtep_ruleset import VtepConfig
from weft.adapters.netns.nft.service_maps import read_service_stats
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.domain.addresses import Address, Subnet
from weft.domain.desired.diff import Difference, compose
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Overlay, Port, QosProfile, StateItem, TenantNetns
from weft.domain.errors import Conflict, DatapathFault, NotFound, Unavailable, WeftError
from weft.domain.host_access.state import HostLink
from weft.domain.ids import TenantName
from weft.kernel.mtu import workload_mtu
from weft.kernel.netlink.link import Device, change_link, create_veth, delete_group, ignore_missing_device, read_link
from weft.kernel.netlink.socket import NetlinkError, NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.ports.datapath import (
    NO_CHANGE,
    DriftReport,
    Drop,
    EndpointConfig,
    PartialResult,
    PlugRequest,
    ServiceFlowStats,
    TenantNetnsReport,
    TraceRequest,
    VerdictCounters,
    one_by_one,
)

# Interface indexes of veth pairs begin here, far above those that the kernel assigns itself.
_FIRST_INDEX = 1 << 16
# Items that have no kernel objects besides devices. `plug` and `unplug` create and delete ports.
_DEVICE_ITEMS = (TenantNetns, Overlay, Port)


class LinuxDatapath(KernelTools):
    """See `weft.ports.datapath`. `directory` is where tenant netns are pinned; `vtep` is the local end of tunnels."""

    def __init__(
        self,
        *,
        directory: Path,
        vtep: Address,
        vxlan_port: int,
        nat_exclude: Sequence[Subnet] = (),
        node_port_subnets: Sequence[Subnet] = (),
        reserved_ports: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._directory = NamespaceDirectory(directory)
        self._vtep = vtep
        self._vxlan_port = vxlan_port
        self._host_config = HostConfig(vtep, vxlan_port, (*nat_exclude,), (*node_port_subnets,), (*reserved_ports,))
        self._tenants: dict[TenantName, TenantNetnsDriver] = {}
        # Tenants that may have devices waiting for deletion.
        self._reapable: set[TenantName] = set()
        self._indexes = itertools.count(_FIRST_INDEX)
        self._put_device: Final[dict[type, Callable[[Any], object]]] = {
            TenantNetns: lambda item: self._open_netns(item.tenant),
            Segment: lambda item: self._put_segment(self._tenants[item.tenant], item),
            Overlay: lambda item: self._put_overlay(self._tenants[item.tenant], item),
            HostLink: lambda item: self._put_host_link(self._tenants[item.tenant], item),
        }
        self._drop_device: Final[dict[type, Callable[[Any], None]]] = {
            Segment: self._drop_segment,
            Overlay: self._drop_overlay,
            HostLink: lambda item: self._host.drop_link(item.tenant),
            TenantNetns: lambda item: self._drop_netns(item.tenant),
        }

    def __enter__(self) -> Self:
        self._directory.prepare()
        self._underlay_namespace = Namespace.current()
        self._underlay = NetlinkSocket(NETLINK_ROUTE, namespace=self._underlay_namespace)
        self._host = HostNetwork(self._underlay_namespace, self._underlay, self._host_config)
        self._vtep_guard = VtepGuard(self._underlay_namespace, VtepConfig(self._vtep, self._vxlan_port))
        self._mtu = workload_mtu(self._underlay, self._vtep)
        for tenant in self._directory.names():
            self._open_netns(TenantName(tenant))
        # Indexes in use are never assigned again, in any netns: `unplug` finds the pod's end of a veth pair by its
        # index alone, and must not hit the interface of a later pod.
        used = [index for netns in self._tenants.values() for index in netns.indexes.values()]
        above = max(used, default=0) + 1
        # Even, because the two ends of a pair have successive indexes.
        self._indexes = itertools.count(max(_FIRST_INDEX, above + above % 2))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for netns in self._tenants.values():
            netns.close()
        self._host.close()
        self._vtep_guard.close()
        self._underlay.close()
        self._underlay_namespace.close()

    @property
    def mtu(self) -> int:
        return self._mtu

    def converge(self, desired: Set[StateItem], *, keep_unknown: bool = False) -> DriftReport:
        # Before any overlay exists.
        repaired = self._vtep_guard.converge(desired)
        report = self._converge_tenants(desired, keep_unknown=keep_unknown)
        return msgspec.structs.replace(report, repaired=(*repaired, *report.repaired))

    def _converge_tenants(self, desired: Set[StateItem], *, keep_unknown: bool = False) -> DriftReport:
        if keep_unknown:
            desired = desired | {TenantNetns(TenantName(name)) for name in self._directory.names()}
        repaired: list[str] = []
        missing: set[Port] = set()
        by_tenant: defaultdict[TenantName, set[StateItem]] = defaultdict(set)
        for item in desired:
            by_tenant[item.tenant].add(item)
        for name in self._directory.names() - by_tenant.keys():
            repaired.append(f"removed the netns of tenant {name}")
            self._drop_netns(TenantName(name))
        for tenant, items in by_tenant.items():
            netns = self._open_netns(tenant)
            # Bridges come before the overlays that join them.
            repairs = [each for item in items if isinstance(item, Segment) for each in self._put_segment(netns, item)]
            overlays = [item for item in items if isinstance(item, Overlay)]
            repairs += [
                f"replaced device {overlay_name(overlay.vni)}"
                for overlay in overlays
                if self._put_overlay(netns, overlay)
            ]
            repairs += [
                f"created {item}" for item in items if isinstance(item, HostLink) and self._put_host_link(netns, item)
            ]
            netns_repairs, absent = netns.converge(items, overlays, keep_unknown=keep_unknown)
            repaired += [f"tenant {tenant}: {each}" for each in (*repairs, *netns_repairs)]
            missing |= absent
            self._reapable.add(tenant)
        repaired += self._host.converge(desired)
        self.reap()
        return DriftReport(repaired=tuple(repaired), missing=frozenset(missing))

    def apply(self, difference: Difference[StateItem]) -> None:
        self._vtep_guard.admit(difference.put)
        # Devices exist before anything that uses them, and go after it.
        for item in difference.put:
            if put_device := self._put_device.get(type(item)):
                put_device(item)
        put, drop = _by_tenant(difference.put), _by_tenant(difference.drop)
        for tenant in put.keys() | (drop.keys() & self._tenants.keys()):
            self._tenants[tenant].change(drop=drop.get(tenant, ()), put=put.get(tenant, ()))
        self._host.change(drop=difference.drop, put=difference.put)
        self._reapable |= {item.tenant for item in (*difference.put, *difference.drop) if isinstance(item, QosProfile)}
        # A link that only changes its addresses is in both: it stays.
        kept_links = {item.tenant for item in difference.put if isinstance(item, HostLink)}
        for item in difference.drop:
            if isinstance(item, HostLink) and item.tenant in kept_links:
                continue
            if drop_device := self._drop_device.get(type(item)):
                drop_device(item)
        self._vtep_guard.dismiss(difference.drop)

    def plug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        self._configure(config)
        self._add_endpoints([PlugRequest(config, changes)])

    def plug_batch(self, requests: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        """See `weft.ports.datapath`. One nft transaction per tenant serves all endpoints that could be configured."""
        faults = [*one_by_one(lambda request: self._configure(request.config), requests)]
        configured = [request for request, fault in zip(requests, faults, strict=True) if fault is None]
        try:
            self._add_endpoints(configured)
            results: Iterator[WeftError | None] = itertools.repeat(None)
        except WeftError:
            # One endpoint failed the whole transaction: one by one, the others succeed.
            results = one_by_one(lambda request: self._add_endpoints([request]), configured)
        yield from (fault or next(results) for fault in faults)

    def _configure(self, config: EndpointConfig) -> None:
        """Create and configure everything that an endpoint needs. It cannot send yet."""
        netns = self._tenants[config.port.tenant]
        with pod_netns.open_netns(config, home=self._underlay_namespace) as (namespace, pod_netlink):
            pod_index = self._create_veth(netns, config, namespace=namespace, pod_netlink=pod_netlink)
            pod_netns.configure_pod(config, pod_index, namespace=namespace, pod_netlink=pod_netlink)
            netns.activate_link(config.port, pod_index - 1)

    def _add_endpoints(self, requests: Sequence[PlugRequest]) -> None:
        """Allow configured endpoints to send, those of a tenant in one transaction."""
        for tenant in {request.config.port.tenant for request in requests}:
            own = [request for request in requests if request.config.port.tenant == tenant]
            changes = compose(request.changes for request in own)
            self._tenants[tenant].add_endpoint([request.config.port for request in own], changes)
            self._host.change(drop=changes.drop, put=changes.put)

    def _create_veth(
        self, netns: TenantNetnsDriver, config: EndpointConfig, *, namespace: Namespace, pod_netlink: NetlinkSocket
    ) -> int:
        """Create a veth pair and configure its host end in one datagram; return the index of the pod's end.

        We choose the indexes, so nothing has to be read back. That of the pod's end follows that of the host end.
        """
        port = config.port
        while True:
            host_index, pod_index = next(self._indexes), next(self._indexes)
            if host_index in netns.indexes.values():
                continue
            end = Device(name=port.interface, index=host_index, mac=PORT_MAC, mtu=config.mtu)
            peer = Device(name=config.interface, index=pod_index, mac=port.mac, mtu=config.mtu)
            try:
                netns.netlink.send_batch(
                    [create_veth(end, peer, peer_namespace=namespace.fd), *netns.port_requests(port, host_index)]
                )
            except NetlinkError as error:
                # Only the first request, the creation, fails because of a name or an index in use.
                if error.position > 0 or error.errno not in {errno.EBUSY, errno.EEXIST}:
                    raise
                if port.tenant in self._reapable:
                    # The name may be that of a device that waits for deletion.
                    self.reap()
                else:
                    _raise_if_name_taken(netns, config, pod_netlink)
            else:
                netns.register_port(port, host_index)
                return pod_index

    def unplug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        tenant = config.port.tenant
        netns = self._tenants.get(tenant)
        if netns is None:
            return
        self._host.change(drop=changes.drop, put=changes.put)
        netns.remove_endpoint(config.port, changes)
        host_index = netns.indexes.pop(config.port.interface, 0)
        netns.clear_qos(config.port)
        if host_index:
            self._free_pod_name(config, host_index + 1)
            # No packet passes it any more. Setting it down or renaming it would wait for the kernel for nothing.
            with ignore_missing_device():
                netns.netlink.send_batch([change_link(host_index, group=REAPED_GROUP)])
        self._reapable.add(tenant)

    def _free_pod_name(self, config: EndpointConfig, pod_index: int) -> None:
        """Set the pod's end down and rename it, so that the next ADD in its netns can use the name at once."""
        if not config.netns:
            return
        name = f"{DELETED_POD_LINK_PREFIX}{next(self._indexes)}"
        with (
            suppress(NotFound),
            pod_netns.open_netns(config, home=self._underlay_namespace) as (_, pod_netlink),
            ignore_missing_device(),
        ):
            pod_netlink.send_batch(
                [
                    *pod_netns.deconfigure_pod(config, pod_index),
                    change_link(pod_index, up=False),
                    change_link(pod_index, name=name),
                ]
            )

    def check(self, config: EndpointConfig) -> list[str]:
        netns = self._tenants.get(config.port.tenant)
        if netns is None:
            return [f"the netns of tenant {config.port.tenant} is missing"]
        found = netns.differences(config.port)
        try:
            with pod_netns.open_netns(config, home=self._underlay_namespace) as (_, pod_netlink):
                found += pod_netns.differences(config, pod_netlink)
        except NotFound as error:
            found.append(error.message)
        return found

    def drops(self) -> list[Drop]:
        found: list[Drop] = []
        faults: list[str] = []
        try:
            found += self._vtep_guard.drops()
        except DatapathFault as error:
            faults.append(f"host: {error.message}")
        for tenant, netns in self._tenants.items():
            try:
                found += read_drops(tenant, netns)
            except DatapathFault as error:
                faults.append(f"tenant {tenant}: {error.message}")
        found.sort(key=lambda drop: drop.at)
        if faults:
            raise PartialResult("; ".join(faults), found)
        return found

    def trace(self, request: TraceRequest) -> str | Drop:
        name = request.port.interface
        raise Unavailable(f"the kernel cannot trace a hypothetical packet from {name}: send a real one with --packet")

    def counters(self) -> list[VerdictCounters]:
        tenants = [read_verdict_counters(tenant, self._tenants[tenant]) for tenant in sorted(self._tenants)]
        return [*self._vtep_guard.counters(), *tenants]

    def service_flows(self) -> list[ServiceFlowStats]:
        return [
            stats
            for tenant in sorted(self._tenants)
            for stats in read_service_stats(tenant, self._tenants[tenant].netfilter)
        ]

    def flush_datapath_cache(self) -> None:
        """See `weft.ports.datapath`. Nothing to do: the kernel evaluates its rules for every packet."""

    def has_drifted(self, *, in_sync: bool = True) -> bool:  # noqa: ARG002 (a datapath in the kernel does not restart)
        return (
            self._host.has_drifted()
            or self._vtep_guard.has_drifted()
            or any(netns.table.has_drifted() for netns in self._tenants.values())
        )

    def inspect(self) -> list[TenantNetnsReport]:
        return [survey_tenant_netns(tenant, self._tenants[tenant]) for tenant in sorted(self._tenants)]

    def reap(self) -> None:
        for tenant in list(self._reapable):
            if netns := self._tenants.get(tenant):
                netns.netlink.send_batch([delete_group(REAPED_GROUP)])
            # After the request: if it fails, the next call tries again.
            self._reapable.discard(tenant)
        for netns in self._tenants.values():
            netns.flush_stale_addresses()

    def uninstall(self) -> list[str]:
        return [*self._converge_tenants(frozenset()).repaired, *self._vtep_guard.remove()]

    def _open_netns(self, tenant: TenantName) -> TenantNetnsDriver:
        if tenant not in self._tenants:
            netns = TenantNetnsDriver(self._directory.create(tenant))
            netns.prepare()
            self._tenants[tenant] = netns
            # Before the first packet, so that no drop goes unexplained. A failure is not fatal: `drops` reports it.
            with suppress(NetlinkError):
                netns.open_drop_log()
        return self._tenants[tenant]

    def _drop_netns(self, tenant: TenantName) -> None:
        if netns := self._tenants.pop(tenant, None):
            netns.close()
        self._directory.delete(tenant)

    def _put_host_link(self, netns: TenantNetnsDriver, link: HostLink) -> bool:
        return self._host.put_link(link, netns, mtu=self._mtu)

    def _put_segment(self, netns: TenantNetnsDriver, segment: Segment) -> list[str]:
        return netns.put_segment(segment, mtu=self._mtu)

    def _drop_segment(self, segment: Segment) -> None:
        if netns := self._tenants.get(segment.tenant):
            netns.drop_segment(segment)

    def _put_overlay(self, netns: TenantNetnsDriver, overlay: Overlay) -> bool:
        return netns.put_overlay(overlay, self._underlay, vtep=self._vtep, port=self._vxlan_port, mtu=self._mtu)

    def _drop_overlay(self, overlay: Overlay) -> None:
        if netns := self._tenants.get(overlay.tenant):
            netns.drop_overlay(overlay)


def _raise_if_name_taken(netns: TenantNetnsDriver, config: EndpointConfig, pod_netlink: NetlinkSocket) -> None:
    """Raise `Conflict` if one of the two names is in use; otherwise it was an index."""
    if read_link(pod_netlink, config.interface) is not None:
        raise Conflict(f"interface {config.interface} is in {config.netns} already", field="CNI_IFNAME")
    if read_link(netns.netlink, config.port.interface) is not None:
        raise Conflict(f"the host end {config.port.interface} exists already")


def _by_tenant(items: tuple[StateItem, ...]) -> dict[TenantName, list[StateItem]]:
    """Group the items that have kernel objects besides devices by tenant."""
    found: defaultdict[TenantName, list[StateItem]] = defaultdict(list)
    for item in items:
        if not isinstance(item, _DEVICE_ITEMS):
            found[item.tenant].append(item)
    return found
