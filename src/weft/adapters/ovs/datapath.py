"""The Datapath on Open vSwitch, in four modes (contiv 7.1): one integration bridge, a conntrack zone for each tenant.

On the wire it is compatible with the linux datapath: each overlay has a kernel VXLAN device, which is a port of the
bridge. VLAN networks leave through the uplinks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from weft.adapters.netns.devices import overlay_name
from weft.adapters.netns.diagnostics import KernelTools, probe_macvlan
from weft.adapters.netns.host.ruleset import HostConfig
from weft.adapters.netns.host.vtep_guard import VtepGuard
from weft.adapters.netns.host.vtep_ruleset import VtepConfig
from weft.adapters.ovs.control.health import check_switch
from weft.adapters.ovs.control.packet_in import decode_drop
from weft.adapters.ovs.control.trace import trace
from weft.adapters.ovs.control.unixctl import wait_for_revalidation
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.ovsdb.bridge import BRIDGE, TENANT_KEY, SwitchBridge, open_database
from weft.adapters.ovs.ovsdb.uplinks import Uplinks
from weft.adapters.ovs.pipeline.flow_table import FlowTable
from weft.adapters.ovs.pipeline.pipeline import tags_without_uplink, unsupported_items
from weft.adapters.ovs.pipeline.tables import NAMES
from weft.adapters.ovs.ports.devices import Devices, FdbItem
from weft.adapters.ovs.ports.garp import announced_macs
from weft.adapters.ovs.ports.provisioner import PortProvisioner, refuse_unsupported
from weft.adapters.ovs.ports.reconcile import ISOLATION_CLEANUP, ISOLATION_RULES
from weft.adapters.ovs.tenant_netns import TenantNamespaces
from weft.domain.addresses import Address, Subnet
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import Overlay, Port, StateItem, TenantNetns
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.ids import TenantName
from weft.kernel.mtu import workload_mtu
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.nftables import open_nftables
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.ports.datapath import (
    NO_CHANGE,
    CheckResult,
    DriftReport,
    Drop,
    EndpointConfig,
    PartialResult,
    PlugRequest,
    ServiceFlowStats,
    TenantNetnsReport,
    TraceRequest,
    VerdictCounters,
)

_NEVER_CONNECTED = (0, 0)
# How often to count our flows. OVS sends no notification when another controller deletes some.
_FLOW_COUNT_INTERVAL_S = 1.0


class _SwitchState(NamedTuple):
    """What drift detection compares: connections to the daemons, port numbers, and whether the uplinks have changed."""

    connect_counts: tuple[int, int]
    ofports: Mapping[str, int]
    uplinks_drifted: bool


class OvsDatapath(KernelTools):
    """See `weft.ports.datapath`. `switch` is the directory with the sockets of OVS; `vtep` the local end of tunnels.

    Tenant netns are pinned in `directory`. `uplinks` are the interfaces for VLAN networks.
    """

    def __init__(
        self,
        *,
        switch: Path,
        directory: Path,
        vtep: Address,
        vxlan_port: int,
        uplinks: Sequence[str] = (),
        nat_exclude: Sequence[Subnet] = (),
        node_port_subnets: Sequence[Subnet] = (),
        reserved_ports: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._directory = directory
        self._host_config = HostConfig(vtep, vxlan_port, (*nat_exclude,), (*node_port_subnets,), (*reserved_ports,))
        self._vtep = vtep
        self._vxlan_port = vxlan_port
        self._switch = switch
        self._database = open_database(switch)
        self._bridge = SwitchBridge(self._database, table_names={int(table): name for table, name in NAMES.items()})
        self._uplinks = Uplinks(uplinks, switch=switch, database=self._database, integration=self._bridge)
        self._openflow = OpenFlow(f"unix:{switch / BRIDGE}.mgmt")
        self._flows = FlowTable(self._openflow)
        self._connect_counts = _NEVER_CONNECTED
        self._next_flow_count = 0.0
        self._uplink_faults: list[str] = []
        # Repairs by `has_drifted`, for the next `converge` to report.
        self._replay_log: list[str] = []
        # Whether flows were replayed to a restarted switch and not read back since.
        self._flows_unverified = False
        self._last_seen: _SwitchState | None = _SwitchState(_NEVER_CONNECTED, {}, uplinks_drifted=False)

    def __enter__(self) -> Self:
        self._namespace = Namespace.current()
        self._netlink = NetlinkSocket(NETLINK_ROUTE, namespace=self._namespace)
        self._nftables = open_nftables(self._namespace)
        self._vtep_guard = VtepGuard(self._namespace, VtepConfig(self._vtep, self._vxlan_port))
        self._mtu = workload_mtu(self._netlink, self._vtep)
        self._devices = Devices(self._namespace, self._netlink, vtep=self._vtep, port=self._vxlan_port, mtu=self._mtu)
        self._namespaces = TenantNamespaces(
            self._directory, self._namespace, self._netlink, mtu=self._mtu, host_config=self._host_config
        )
        self._ports = PortProvisioner(
            bridge=self._bridge,
            openflow=self._openflow,
            flows=self._flows,
            devices=self._devices,
            namespaces=self._namespaces,
            uplinks=self._uplinks,
            vtep=self._vtep,
            mtu=self._mtu,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._namespaces.close()
        self._openflow.close()
        self._uplinks.close()
        self._database.close()
        self._nftables.close()
        self._vtep_guard.close()
        self._devices.close()
        self._netlink.close()
        self._namespace.close()

    @property
    def mtu(self) -> int:
        return self._mtu

    def converge(self, desired: Set[StateItem], *, keep_unknown: bool = False) -> DriftReport:
        if keep_unknown:
            desired = desired | {TenantNetns(tenant) for tenant in self._bridge.tenants()}
        self._flows.note_desired(desired)
        repaired = [*self._replay_log, *self._bridge.prepare(), *self._restore_flows(desired), *self._prepare()]
        repaired += self._vtep_guard.converge(desired)
        tenants = {item.tenant for item in desired if isinstance(item, TenantNetns)}
        # Netns ports are named by tenant IDs, and flows contain them.
        self._bridge.allocate_tenant_ids(tenants)
        repaired += self._ports.ensure_namespaces(tenants)
        port_changes, links = self._ports.reconcile(desired, keep_unknown=keep_unknown)
        repaired += port_changes
        repaired += self._devices.converge_fdb((item for item in desired if isinstance(item, FdbItem)), links)
        repaired += self._namespaces.converge(desired)
        # Flows after ports: they contain the port numbers.
        repaired += self._flows.converge(desired, self._ports.flow_context())
        self._uplinks.announce(announced_macs(desired, self._vtep))
        # Last: until here flows and ports may still use the IDs.
        self._release_tenants(self._bridge.tenants().keys() - tenants)
        self._connect_counts = self._read_connect_counts()
        self._ports.accept_ofports()
        self._replay_log, self._flows_unverified = [], False
        # Raised at the end: all that can be done has been done.
        if faults := [*unsupported_items(desired), *self._uplink_faults]:
            raise DatapathFault("; ".join(faults))
        ofports = self._ports.expected_ofports
        missing = {item for item in desired if isinstance(item, Port) and item.interface not in ofports}
        return DriftReport(repaired=tuple(repaired), missing=frozenset(missing))

    def _restore_flows(self, desired: Set[StateItem]) -> list[str]:
        """Install flows before anything else if ovs-vswitchd has restarted; a log of the changes.

        Its ports request the same numbers again, so the flows still fit. Reading back the rest takes longer than the
        restart itself. Flows that were replayed may be stale by now, so these are compared at once too.
        """
        if self._flows.was_flushed():
            return self._flows.refill(desired, self._ports.flow_context())
        return self._flows.converge(desired, self._ports.flow_context()) if self._flows_unverified else []

    def _prepare(self) -> list[str]:
        """Create or repair the bridges, and isolate their ports from the host; a log of the changes."""
        repaired = self._bridge.prepare()
        self._nftables.run(ISOLATION_RULES)
        repaired += self._prepare_uplinks()
        self._connect_counts = self._read_connect_counts()
        return repaired

    def _prepare_uplinks(self) -> list[str]:
        """A broken uplink must not stop the rest of the node: `converge` reports it at its end."""
        self._uplink_faults = []
        try:
            return self._uplinks.converge(self._netlink)
        except DatapathFault as error:
            self._uplink_faults = [error.message]
            return []

    def apply(self, difference: Difference[StateItem]) -> None:
        with self._flows.updating():
            self._apply(difference)

    def _apply(self, difference: Difference[StateItem]) -> None:
        # A first change may come before the first `converge`.
        if self._connect_counts == _NEVER_CONNECTED:
            self._prepare()
        self._vtep_guard.admit(difference.put)
        added = {item.tenant for item in difference.put if isinstance(item, TenantNetns)}
        self._bridge.allocate_tenant_ids(added)
        self._ports.ensure_namespaces(added)
        self._ports.add_overlays(item for item in difference.put if isinstance(item, Overlay))
        drop, put = _without_ports(difference.drop), _without_ports(difference.put)
        self._flows.apply(drop=drop, put=put, context=self._ports.flow_context())
        self._namespaces.apply(drop=drop, put=put)
        self._devices.apply_fdb(
            drop=[item for item in drop if isinstance(item, FdbItem)],
            put=[item for item in put if isinstance(item, FdbItem)],
        )
        removed = {item.tenant for item in drop if isinstance(item, TenantNetns)} - added
        # An item that changes is in both. Its device stays.
        kept = {overlay_name(item.vni) for item in put if isinstance(item, Overlay)}
        overlays = [item for item in drop if isinstance(item, Overlay) and overlay_name(item.vni) not in kept]
        self._ports.remove(overlays=overlays, tenants=removed)
        self._namespaces.delete(removed)
        self._release_tenants(removed)
        self._ports.accept_ofports()
        self._vtep_guard.dismiss(difference.drop)
        refuse_unsupported(difference.put)

    def flush_datapath_cache(self) -> None:
        wait_for_revalidation(self._switch, trigger=self._flows.rewrite_flow)

    def plug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        for fault in self.plug_batch([PlugRequest(config, changes)]):
            if fault is not None:
                raise fault

    def plug_batch(self, requests: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        return self._ports.plug_batch(requests)

    def unplug(self, config: EndpointConfig, changes: Difference[StateItem] = NO_CHANGE) -> None:
        self._ports.unplug(config, changes)

    def check(self, config: EndpointConfig) -> list[str]:
        self._database.ensure_connected()
        port = self._bridge.ports().get(config.port.interface)
        differences = self._devices.differences(config)
        if port is None or not port.ofport:
            differences.append(f"{config.port.interface} is not a port of {BRIDGE}")
        return differences + [f"flow {flow} is missing" for flow in self._flows.missing_flows(config.port)]

    def drops(self) -> list[Drop]:
        tenants = {tenant_id: tenant for tenant, tenant_id in self._bridge.tenants().items()}
        ports = {port.ofport: port for port in self._bridge.ports().values() if port.ofport}
        decoded = (decode_drop(packet_in, tenants, ports) for packet_in in self._openflow.take_packet_ins())
        drops = [drop for drop in decoded if drop is not None]
        try:
            return [*self._vtep_guard.drops(), *drops]
        except DatapathFault as error:
            # Another program may have bound the host's nflog group; packet-ins that are taken must not be lost.
            raise PartialResult(f"host: {error.message}", drops) from error

    def trace(self, request: TraceRequest) -> str | Drop:
        trunk, items = self._uplinks.trunk, self._flows.items
        return trace(self._switch, request, self._bridge.ports(), trunk=trunk, items=items)

    def counters(self) -> list[VerdictCounters]:
        return [*self._vtep_guard.counters(), *self._flows.counters(self._bridge.tenants())]

    def service_flows(self) -> list[ServiceFlowStats]:
        return self._namespaces.service_flows()

    def has_drifted(self, *, in_sync: bool = True) -> bool:
        """See `weft.ports.datapath`. Reports a daemon that is down once, and once more when it is back."""
        before, self._last_seen = self._last_seen, self._read_state(in_sync=in_sync)
        expected = _SwitchState(self._connect_counts, self._ports.expected_ofports, uplinks_drifted=False)
        if self._last_seen == expected:
            # The cheap comparison first: this runs every 50 ms.
            return self._namespaces.has_drifted() or self._vtep_guard.has_drifted() or self._have_flows_drifted()
        return self._last_seen != before

    def _read_state(self, *, in_sync: bool) -> _SwitchState | None:
        """The state of the switch now; None while a daemon is down. May replay flows to a restarted switch."""
        try:
            self._database.poll()
            replayed = self._flows.poll(in_sync=in_sync)
            self._replay_log += replayed
            self._flows_unverified |= bool(replayed)
            self._uplinks.poll()
        except DatapathFault:
            return None
        return _SwitchState(self._read_connect_counts(), self._ports.read_ofports(), self._uplinks.has_drifted())

    def _have_flows_drifted(self) -> bool:
        if time.monotonic() < self._next_flow_count:
            return False
        self._next_flow_count = time.monotonic() + _FLOW_COUNT_INTERVAL_S
        try:
            return self._flows.has_drifted() or self._uplinks.lacks_flows()
        except DatapathFault:
            # The connection was lost just now; `converge` finds out more.
            return True

    def inspect(self) -> list[TenantNetnsReport]:
        ports, links = self._bridge.ports(), self._devices.read()
        faults = [f"{name}: {port.error}" for name, port in ports.items() if port.error]
        faults += [] if self._uplinks.trunk else tags_without_uplink(self._flows.items)
        return [
            TenantNetnsReport(
                tenant=tenant,
                ports=tuple(
                    sorted(name for name, port in ports.items() if port.external_ids.get(TENANT_KEY) == tenant)
                ),
                devices=tuple(sorted(links)),
                faults=tuple(faults),
            )
            for tenant in sorted(self._bridge.tenants())
        ]

    @staticmethod
    def probe() -> list[str]:
        """See `weft.ports.datapath.DatapathTools`."""
        return [*KernelTools.probe(), *probe_macvlan()]

    @staticmethod
    def check_switch(switch: Path) -> Iterator[CheckResult]:
        """See `weft.ports.datapath.DatapathTools`."""
        return check_switch(switch)

    @staticmethod
    def enter_host_side_netns(directory: Path, tenant: TenantName) -> None:
        """See `weft.ports.datapath.DatapathTools`. Nothing to do: OVS ports are in the host netns."""

    def reap(self) -> None:
        self._ports.reap()

    def uninstall(self) -> list[str]:
        self._database.ensure_connected()
        removed = self._uplinks.remove()
        devices = self._ports.remove_all()
        removed += self._namespaces.converge(frozenset())
        removed += [f"removed device {name}" for name in devices]
        removed += self._bridge.remove(self._openflow)
        self._nftables.run(ISOLATION_CLEANUP)
        return removed + self._vtep_guard.remove()

    def _release_tenants(self, tenants: Iterable[TenantName]) -> None:
        """Release tenant IDs. Flush their conntrack zones first: the next tenant with the ID must not find entries."""
        known = self._bridge.tenants()
        released = [tenant for tenant in tenants if tenant in known]
        self._openflow.flush_zones(known[tenant] for tenant in released)
        self._bridge.release_tenant_ids(released)
        self._flows.forget_tenants({*released})

    def _read_connect_counts(self) -> tuple[int, int]:
        return self._database.connect_count, self._openflow.connect_count + self._uplinks.connect_count


def _without_ports(items: Iterable[StateItem]) -> list[StateItem]:
    """All but ports, which only `plug` and `unplug` add and remove."""
    return [item for item in items if not isinstance(item, Port)]
