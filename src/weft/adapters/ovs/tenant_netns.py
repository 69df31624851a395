"""Tenant network namespaces of the ovs datapath: gateways, services and host access, done by the kernel as on linux.

A tenant netns is pinned in a directory, and attached to the bridge by two internal ports (`tenant_netns_flows`). It
routes to workloads of this node by the local port, to those of other nodes by the remote port. The bridge enforces
policy; the netns has no policy state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from weft.adapters.netns.devices import NETNS_PORT_PREFIX, PORT_MAC, overlay_name
from weft.adapters.netns.host.network import HostNetwork
from weft.adapters.netns.host.ruleset import HostConfig
from weft.adapters.netns.nft.service_maps import read_service_stats
from weft.adapters.netns.tenant_netns import TenantNetnsDriver
from weft.adapters.ovs.pipeline.context import host_prefix
from weft.adapters.ovs.pipeline.tenant_netns_flows import local_netns_port, remote_netns_port
from weft.domain.addresses import Address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Gateway, Overlay, Port, RemoteRoute, StateItem, TenantNetns
from weft.domain.errors import DatapathFault
from weft.domain.host_access.state import HostLink, is_host_scoped
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Backend, Frontend, FrontendSources, Vip
from weft.kernel.netlink.link import (
    Device,
    change_address_settings,
    change_link,
    create_macvlan,
    delete_link,
    read_link,
)
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace, NamespaceDirectory
from weft.ports.datapath import NO_CHANGE, ServiceFlowStats

# Inside the netns the remote port has the name of an overlay device with this VNI, which no overlay has: the rules that
# are shared with the linux datapath recognise tunnels by name.
_REMOTE_VNI = 0
_LOCAL_INSIDE: Final = f"{NETNS_PORT_PREFIX}0"
_REMOTE_INSIDE: Final = overlay_name(_REMOTE_VNI)
_TenantAddress = tuple[TenantName, Address]


class TenantNamespaces:
    """The tenant netns of this node. They are pinned in `directory`; `namespace` is the netns of OVS and the host."""

    def __init__(self, directory: Path, namespace: Namespace, netlink: NetlinkSocket, *, mtu: int,
                 host_config: HostConfig) -> None:  # fmt: skip
        self._directory = NamespaceDirectory(directory)
        self._directory.prepare()
        self._netlink = netlink
        self._mtu = mtu
        self._host = HostNetwork(namespace, netlink, host_config)
        self._drivers: dict[TenantName, TenantNetnsDriver] = {}
        # Addresses of local endpoints. A `RemoteMac` with the same address is stale, and must not add a route.
        self._local: set[_TenantAddress] = set()
        # Netns of a previous run. `converge` deletes those whose tenants are gone.
        for name in self._directory.names():
            self._open(TenantName(name))

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()
        self._host.close()

    def incomplete(self, tenant_ids: Mapping[TenantName, int]) -> dict[TenantName, int]:
        """Those of some tenants whose netns does not exist, or lacks a port."""
        return {
            tenant: tenant_id for tenant, tenant_id in tenant_ids.items() if not self._is_attached(tenant, tenant_id)
        }

    def remove_ports(self, tenant_ids: Mapping[TenantName, int]) -> None:
        """Delete leftover devices of netns ports, which OVS does not have any more."""
        for tenant, tenant_id in tenant_ids.items():
            driver = self._open(tenant)
            for outside, inside in _port_devices(tenant_id):
                for netlink, name in ((self._netlink, outside), (driver.netlink, inside)):
                    if (stale := read_link(netlink, name)) is not None:
                        netlink.send_batch([delete_link(stale.index)])

    def create(self, tenant_ids: Mapping[TenantName, int]) -> list[str]:
        """Create the netns of tenants, and attach them to their ports, which OVS has created; a log of the changes."""
        for tenant, tenant_id in tenant_ids.items():
            driver = self._open(tenant)
            for outside, inside in _port_devices(tenant_id):
                self._attach(driver, outside, inside)
            driver.refresh_links()
        return [f"created the netns of tenant {tenant}" for tenant in tenant_ids]

    def delete(self, tenants: Iterable[TenantName]) -> None:
        """Delete the netns of tenants, and their links to the host."""
        for tenant in tenants:
            self._host.drop_link(tenant)
            if driver := self._drivers.pop(tenant, None):
                driver.close()
            self._directory.delete(tenant)

    def converge(self, desired: Set[StateItem]) -> list[str]:
        """Make the content of all netns, which are attached, that of `desired`; a log of the changes."""
        tenants = {item.tenant for item in desired if isinstance(item, TenantNetns)}
        stale = self._drivers.keys() - tenants
        self.delete(stale)
        repaired = [f"removed the netns of tenant {tenant}" for tenant in stale]
        self._local = _local_addresses(desired)
        by_tenant = self._by_tenant(desired)
        for tenant in tenants:
            driver, items = self._drivers[tenant], by_tenant[tenant]
            created = [item for item in items if isinstance(item, HostLink) and self._put_link(item)]
            changes, _ = driver.converge(set(items), [Overlay(tenant, _REMOTE_VNI)])
            repaired += [f"tenant {tenant}: {change}" for change in (*(f"made {link}" for link in created), *changes)]
        return repaired + self._host.converge(desired)

    def apply(self, *, drop: Sequence[StateItem], put: Sequence[StateItem]) -> None:
        """Remove and add state items in the netns that exist."""
        self._local |= _local_addresses(put)
        added, removed = self._by_tenant(put), self._by_tenant(drop)
        # Routes and rules refer to the link.
        for items in added.values():
            for item in items:
                if isinstance(item, HostLink):
                    self._put_link(item)
        for tenant in (added.keys() | removed.keys()) & self._drivers.keys():
            self._drivers[tenant].change(drop=removed[tenant], put=added[tenant])
        self._host.change(drop=drop, put=put)
        linked = {item.tenant for item in put if isinstance(item, HostLink)}
        for item in drop:
            if isinstance(item, HostLink) and item.tenant not in linked:
                self._host.drop_link(item.tenant)

    def remove_endpoint(self, port: Port) -> None:
        """Remove an endpoint's routes, and flush its conntrack entries."""
        self._local -= _local_addresses([port])
        if driver := self._drivers.get(port.tenant):
            driver.remove_endpoint(_behind_local_port(port), NO_CHANGE)

    def reap(self) -> None:
        """Finish deferred work of `remove_endpoint`."""
        for driver in self._drivers.values():
            driver.flush_stale_addresses()

    def service_flows(self) -> list[ServiceFlowStats]:
        """Traffic of service connections, from conntrack of each netns."""
        return [
            stats
            for tenant in sorted(self._drivers)
            for stats in read_service_stats(tenant, self._drivers[tenant].netfilter)
        ]

    def has_drifted(self) -> bool:
        """Whether our state may have been changed from outside."""
        return self._host.has_drifted() or any(driver.table.has_drifted() for driver in self._drivers.values())

    def _open(self, tenant: TenantName) -> TenantNetnsDriver:
        if tenant not in self._drivers:
            driver = TenantNetnsDriver(self._directory.create(tenant))
            driver.prepare()
            self._drivers[tenant] = driver
        return self._drivers[tenant]

    def _is_attached(self, tenant: TenantName, tenant_id: int) -> bool:
        driver = self._drivers.get(tenant)
        if driver is None:
            return False
        driver.refresh_links()
        return all(
            (port := read_link(self._netlink, outside)) is not None
            and (end := read_link(driver.netlink, inside)) is not None
            and end.peer == port.index
            for outside, inside in _port_devices(tenant_id)
        )

    def _attach(self, driver: TenantNetnsDriver, outside: str, inside: str) -> None:
        """Create a macvlan in the netns on top of an OVS port. It has the gateway MAC, to which workloads send."""
        port = read_link(self._netlink, outside)
        if port is None:
            raise DatapathFault(f"device {outside} disappeared after creation")
        self._netlink.send_batch(
            [
                change_address_settings(port.index, link_local=False),
                change_link(port.index, up=True, mac=PORT_MAC),
                create_macvlan(Device(name=inside, mtu=self._mtu), over=port.index, namespace=driver.namespace.fd),
            ]
        )
        if (end := read_link(driver.netlink, inside)) is not None:
            # No ARP: the neighbour entries of workloads are static.
            quiet = [change_address_settings(end.index, link_local=False), change_link(end.index, arp=False)]
            driver.netlink.send_batch([*quiet, change_link(end.index, up=True)])
        # RTM_GETLINK runs pending linkwatch work of the device, so that both ends can transmit at once.
        read_link(self._netlink, outside)

    def _by_tenant(self, items: Iterable[StateItem]) -> defaultdict[TenantName, list[StateItem]]:
        """State items as the netns of their tenants see them."""
        found: defaultdict[TenantName, list[StateItem]] = defaultdict(list)
        for item in items:
            if isinstance(item, RemoteMac):
                remote = [address for address in item.addresses if (item.tenant, address) not in self._local]
                found[item.tenant] += [
                    RemoteRoute(item.tenant, host_prefix(address), _REMOTE_VNI, item.vtep) for address in remote
                ]
            elif type(item) in _NETNS_VIEWS:
                found[item.tenant].append(_NETNS_VIEWS[type(item)](item))
            elif is_host_scoped(item):
                found[item.tenant].append(item)
        return found

    def _put_link(self, item: HostLink) -> bool:
        return self._host.put_link(item, self._drivers[item.tenant], mtu=self._mtu)


def _port_devices(tenant_id: int) -> tuple[tuple[str, str], ...]:
    """The device names of a tenant's two netns ports: at the switch, and in the netns."""
    return (local_netns_port(tenant_id), _LOCAL_INSIDE), (remote_netns_port(tenant_id), _REMOTE_INSIDE)


def _local_addresses(items: Iterable[StateItem]) -> set[_TenantAddress]:
    return {(item.tenant, address) for item in items if isinstance(item, Port) for address in item.addresses}


def _behind_local_port(port: Port) -> Port:
    return replace(port, interface=_LOCAL_INSIDE, segment=0)


def _unchanged(item: StateItem) -> StateItem:
    return item


# How a netns sees state items: it knows no segments, and reaches all workloads by its two ports. Besides these it has
# what `is_host_scoped` says, and nothing else.
_NETNS_VIEWS: Final[Mapping[type, Callable[[Any], StateItem]]] = {
    Port: _behind_local_port,
    RemoteRoute: lambda item: replace(item, vni=_REMOTE_VNI),
    Gateway: lambda item: replace(item, segment=0),
    Backend: _unchanged,
    Frontend: _unchanged,
    FrontendSources: _unchanged,
    Vip: _unchanged,
}
