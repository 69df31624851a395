"""Provision OVS ports with their devices and flows: plug, unplug, the pool, overlays and tenant netns ports.

ovs-vswitchd walks all its ports whenever one is added and whenever a device changes, and forwards nothing meanwhile.
The order of steps below keeps that to one walk for many ports, and lets nothing through before a port is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext

from weft.adapters.netns.devices import overlay_name
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.ovsdb.bridge import SwitchBridge, SwitchPort
from weft.adapters.ovs.ovsdb.external_ids import (
    endpoint_external_ids,
    netns_port_external_ids,
    overlay_external_ids,
    port_external_ids,
)
from weft.adapters.ovs.ovsdb.uplinks import Uplinks
from weft.adapters.ovs.pipeline.conntrack_flush import tenant_addresses
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.flow_table import FlowTable
from weft.adapters.ovs.pipeline.pipeline import unsupported_items
from weft.adapters.ovs.ports.devices import Devices
from weft.adapters.ovs.ports.garp import announced_macs
from weft.adapters.ovs.ports.pool import PortPool
from weft.adapters.ovs.ports.reconcile import reconcile_ports
from weft.adapters.ovs.tenant_netns import TenantNamespaces
from weft.domain.addresses import Address
from weft.domain.desired.diff import Difference, compose
from weft.domain.desired.state import Overlay, Port, StateItem, TenantNetns
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.ids import TenantName
from weft.kernel.netlink.link import Link
from weft.ports.datapath import EndpointConfig, PlugRequest


class PortProvisioner:
    """Adds and removes the ports of the integration bridge."""

    def __init__(
        self,
        *,
        bridge: SwitchBridge,
        openflow: OpenFlow,
        flows: FlowTable,
        devices: Devices,
        namespaces: TenantNamespaces,
        uplinks: Uplinks,
        vtep: Address,
        mtu: int,
    ) -> None:
        self._bridge = bridge
        self._openflow = openflow
        self._flows = flows
        self._devices = devices
        self._namespaces = namespaces
        self._uplinks = uplinks
        self._vtep = vtep
        self._mtu = mtu
        self.pool = PortPool(bridge, devices, mtu=mtu)
        # Ports without flows whose deletion is left to `reap`, by interface name.
        self._unplugged: set[str] = set()
        self._expected: Mapping[str, int] = {}

    @property
    def expected_ofports(self) -> Mapping[str, int]:
        """The port numbers after our last change. If OVS has others, the ports were changed from outside."""
        return self._expected

    def read_ofports(self) -> Mapping[str, int]:
        """The port numbers that OVS has now, without unplugged ports."""
        ofports = self._bridge.ofports()
        # Drift detection runs every 50 ms, so do not copy the mapping without need.
        if self._unplugged.isdisjoint(ofports):
            return ofports
        return {name: ofport for name, ofport in ofports.items() if name not in self._unplugged}

    def accept_ofports(self) -> None:
        """Expect the port numbers that OVS has now."""
        self._expected = self.read_ofports()

    def flow_context(self, reserved: Mapping[str, int] | None = None) -> FlowContext:
        """What flow builders need to know; `reserved` are numbers of ports to come."""
        ofports = self._bridge.ofports()
        return FlowContext(
            tenants=self._bridge.tenants(),
            ports={**ofports, **reserved} if reserved else ofports,
            vtep=self._vtep,
            trunk=self._uplinks.trunk,
        )

    def plug_batch(self, requests: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        """See `weft.ports.datapath.Datapath.plug_batch`. All requests share a bundle, a transaction and a wait."""
        faults: dict[str, WeftError] = {}
        for request in requests:
            with _collect_fault(faults, request.config.port.interface):
                self._check(request)
        accepted = [request for request in requests if request.config.port.interface not in faults]
        try:
            if accepted:
                with self._flows.updating():
                    self._plug(accepted, faults)
        except DatapathFault as error:
            faults |= {request.config.port.interface: error for request in accepted}
        yield from (faults.get(request.config.port.interface) for request in requests)

    def _check(self, request: PlugRequest) -> None:
        """Reject a request that cannot succeed, before anything is changed."""
        refuse_unsupported(request.changes.put)
        interface = request.config.port.interface
        if interface in self._unplugged:
            # A new port must not get the name of one that ovs-vswitchd is still deleting.
            self._delete_unplugged()
            self._bridge.remove_ports({interface}, wait=True)
        self._devices.check_names_free(request.config)

    def _plug(self, requests: Sequence[PlugRequest], faults: dict[str, WeftError]) -> None:
        """Plug endpoints, and add to `faults` those that fail alone.

        Flows come first, for the numbers that the ports will have. Then the ports, whose devices OVS creates, and while
        it does so the tenant netns. The pods' ends come last: no packet passes before.
        """
        self._bridge.database.ensure_connected()
        configs = {request.config.port.interface: request.config for request in requests}
        pooled = self.pool.take(configs.values())
        new = {name: config for name, config in configs.items() if name not in pooled}
        ofports = {name: port.ofport for name, port in pooled.items()} | self._bridge.reserve_ofport(new)
        self._install_flows(requests, self.flow_context(ofports))
        rows = self._bridge.insert_ports(
            {name: endpoint_external_ids(config) for name, config in new.items()},
            ofports,
            {name: config.mtu for name, config in new.items()},
        )
        changes = compose(request.changes for request in requests)
        ports = [request.config.port for request in requests]
        assigned = {port.name: endpoint_external_ids(configs[name]) for name, port in pooled.items()}
        with self._bridge.assign_pool_ports(assigned):
            self._namespaces.apply(drop=changes.drop, put=(*changes.put, *ports))
        self._devices.bring_up_ports(new.values())
        # A barrier of its main loop: ovs-vswitchd has then seen the devices up. Pool ports have been seen before.
        with self._openflow.main_loop_barrier() if new else nullcontext():
            failed = self._bridge.wait_for_ofports(rows, ofports)
            faults |= {name: DatapathFault(reason) for name, reason in failed.items()}
            deleted = DatapathFault("the port was deleted while it was assigned")
            faults |= dict.fromkeys(pooled.keys() - self._bridge.ports().keys(), deleted)
            all_up = self._plug_devices(configs, pooled, faults)
        if not all_up:
            self._openflow.wait_for_main_loop()
        plugged = {name: request for request in requests if (name := request.config.port.interface) not in faults}
        self._uplinks.send_garp(announced_macs((request.config.port for request in plugged.values()), self._vtep))
        self.accept_ofports()
        # Another port may have got a reserved number first.
        if misplaced := [each for name, each in plugged.items() if self._expected.get(name) != ofports[name]]:
            self._install_flows(misplaced, self.flow_context())

    def _plug_devices(
        self, configs: Mapping[str, EndpointConfig], pooled: Mapping[str, SwitchPort], faults: dict[str, WeftError]
    ) -> bool:
        """Create the pods' ends; whether all ports were up already."""
        all_up = True
        for name, config in configs.items():
            if name not in faults:
                with _collect_fault(faults, name):
                    pool_port = pooled[name].name if name in pooled else ""
                    all_up &= self._devices.plug(config, pool_port=pool_port)
        return all_up

    def _install_flows(self, requests: Sequence[PlugRequest], context: FlowContext) -> None:
        """Install the flows of endpoints with their policy, and flush old conntrack entries of their addresses."""
        changes = compose(request.changes for request in requests)
        ports = [request.config.port for request in requests]
        flush = tenant_addresses(port for port in ports if port not in self._flows.items)
        put = (*changes.put, *ports)
        # Items that are known are dropped first: they may have flows for other port numbers.
        self._flows.apply(drop=(*changes.drop, *put), put=put, context=context, flush=flush)

    def unplug(self, config: EndpointConfig, changes: Difference[StateItem]) -> None:
        """Disconnect an endpoint, and remove its flows. `reap` deletes port and device."""
        interface = config.port.interface
        self._devices.unplug(config)
        self._unplugged.add(interface)
        self._expected = {name: ofport for name, ofport in self._expected.items() if name != interface}
        flush = tenant_addresses([config.port])
        with self._flows.updating():
            drop = (*changes.drop, config.port)
            self._flows.apply(drop=drop, put=changes.put, context=self.flow_context(), flush=flush)
            self._namespaces.apply(drop=changes.drop, put=changes.put)
        self._namespaces.remove_endpoint(config.port)

    def reap(self) -> None:
        """Delete unplugged ports, and resize the pool."""
        self._delete_unplugged()
        self._namespaces.reap()
        self._unplugged |= self.pool.resize()

    def _delete_unplugged(self) -> None:
        if self._unplugged:
            # Devices first, all with one request: ovs-vswitchd would wait for the kernel to delete each one.
            self._devices.reap()
            self._bridge.remove_ports(self._unplugged)
            self._unplugged.clear()

    def reconcile(self, desired: Set[StateItem], *, keep_unknown: bool) -> tuple[list[str], dict[str, Link]]:
        """Make the ports those of `desired` as far as their devices exist; a log of the changes, and the devices.

        Creates overlay devices, but no workload ports: these need `plug`.
        """
        repaired: list[str] = []
        tenants = {item.tenant for item in desired if isinstance(item, TenantNetns)}
        external_ids = {item.interface: port_external_ids(item) for item in desired if isinstance(item, Port)}
        external_ids |= netns_port_external_ids(self._bridge.tenant_ids_of(tenants))
        links = self._devices.read()
        overlays = [item for item in desired if isinstance(item, Overlay)]
        outdated = {
            name
            for overlay in overlays
            if (name := overlay_name(overlay.vni)) in links and self._devices.has_other_settings(overlay, links[name])
        }
        # ovs-vswitchd must have closed a device before it opens another one of the same name.
        self._remove_devices_and_ports(outdated, links, wait=True)
        for overlay in overlays:
            external_ids[overlay_name(overlay.vni)] = overlay_external_ids(overlay)
            if overlay_name(overlay.vni) not in links.keys() - outdated:
                repaired.append(f"made device {self._devices.put_overlay(overlay)}")
        if repaired:
            links = self._devices.read()
        repaired += reconcile_ports(self._bridge, self._devices, links, external_ids, keep_unknown=keep_unknown)
        self._unplugged.clear()
        return repaired, links

    def ensure_namespaces(self, tenants: Set[TenantName]) -> list[str]:
        """Create the netns and netns ports of tenants, which have IDs, where missing; a log of the changes."""
        incomplete = self._namespaces.incomplete(self._bridge.tenant_ids_of(tenants))
        external_ids = netns_port_external_ids(incomplete)
        # Start clean: the port, its device or the macvlan on it may be all that is left.
        self._bridge.remove_ports(external_ids.keys(), wait=True)
        self._namespaces.remove_ports(incomplete)
        self._bridge.add_ports(external_ids, dict.fromkeys(external_ids, self._mtu))
        created = self._namespaces.create(incomplete)
        if incomplete:
            self._openflow.wait_for_main_loop()  # ovs-vswitchd sends nothing before it has seen the devices up
        return created

    def add_overlays(self, overlays: Iterable[Overlay]) -> None:
        """Create the devices and ports of overlays."""
        known = self._bridge.ports()
        external_ids = {self._devices.put_overlay(overlay): overlay_external_ids(overlay) for overlay in overlays}
        self._bridge.add_ports({name: own for name, own in external_ids.items() if name not in known})

    def remove(self, *, overlays: Iterable[Overlay], tenants: Set[TenantName]) -> None:
        """Delete the devices and ports of overlays, and the netns ports of tenants."""
        names = {overlay_name(overlay.vni) for overlay in overlays}
        names |= netns_port_external_ids(self._bridge.tenant_ids_of(tenants)).keys()
        if names:
            self._remove_devices_and_ports(names, self._devices.read())

    def _remove_devices_and_ports(self, names: Set[str], links: Mapping[str, Link], *, wait: bool = False) -> None:
        if names:
            self._devices.mark_for_reap(link for name, link in links.items() if name in names)
            self._devices.reap()
            self._bridge.remove_ports(names, wait=wait)

    def remove_all(self) -> list[str]:
        """Delete all our devices and ports; the names of the devices."""
        links = self._devices.read()
        self._devices.mark_for_reap(links.values())
        self._devices.reap()
        self._bridge.remove_ports({*self._bridge.ports(), *self._bridge.pool_ports()}, wait=True)
        return [*links]


def refuse_unsupported(items: Sequence[StateItem]) -> None:
    """`DatapathFault` if the pipeline does not implement some state item: it must not be ignored silently."""
    if faults := unsupported_items(items):
        raise DatapathFault("; ".join(faults))


@contextmanager
def _collect_fault(faults: dict[str, WeftError], interface: str) -> Iterator[None]:
    """Record an error of the block for one endpoint, so that the others of the batch go on."""
    try:
        yield
    except WeftError as error:
        faults[interface] = error
