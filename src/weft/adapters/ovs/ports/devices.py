"""The kernel devices behind OVS ports: workload ports, netns ports, and a VXLAN device for each overlay.

They are in the netns of ovs-vswitchd, and recognised by their name prefixes. They have no addresses: the host's network
stack must not see their packets (`weft.adapters.ovs.ports.reconcile`).

OVS creates workload and netns ports itself, as internal ports. The other end is a macvlan in passthru mode on top of
each, in the netns of the pod or tenant. With the userspace datapath an internal port is a tap, which costs ovs-vswitchd
a fraction of polling a veth (docs/adr/0012). Workload ports of older agents are veths and stay so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from weft.adapters.netns import pod_netns
from weft.adapters.netns.devices import (
    DELETED_POD_LINK_PREFIX,
    NETNS_PORT_PREFIX,
    OVERLAY_PREFIX,
    PORT_PREFIX,
    REAPED_GROUP,
    overlay_hop_mac,
    overlay_mac,
    overlay_name,
)
from weft.adapters.ovs.ovsdb.external_ids import device_alias
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Overlay, VxlanPeer
from weft.domain.errors import Conflict, DatapathFault, Invalid, NotFound
from weft.kernel.netlink.link import (
    Device,
    Link,
    Vxlan,
    add_altname,
    change_address_settings,
    change_link,
    create_macvlan,
    create_vxlan,
    delete_group,
    ignore_missing_device,
    read_link,
    read_links,
)
from weft.kernel.netlink.neigh import DEFAULT_FDB_MAC, FdbEntry, drop_fdb_entry, put_fdb_entry, read_fdb
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.uapi.netlink import NETLINK_ROUTE
from weft.kernel.uapi.rtnetlink import RTNLGRP_LINK
from weft.ports.datapath import EndpointConfig

# IFALIASZ without the terminating zero.
_MAX_ALIAS = 255
# How long `bring_up_ports` waits for devices, and how many link notifications it reads at once.
_BRING_UP_S, _MAX_NOTIFICATIONS = 1.0, 1000
# IFLA_INFO_KIND of internal ports: of the userspace datapath, and of the kernel module.
_TAP, _OVS_INTERNAL = "tun", "openvswitch"

# State items that become FDB entries of an overlay device: a node, or a remote endpoint on a segment.
FdbItem = VxlanPeer | RemoteMac


class Devices:
    """Create, configure and delete the devices. `vtep` is the local address of tunnels."""

    def __init__(self, namespace: Namespace, netlink: NetlinkSocket, *, vtep: Address, port: int, mtu: int) -> None:
        self._namespace = namespace
        self._netlink = netlink
        self._link_events = NetlinkSocket(NETLINK_ROUTE, namespace=namespace)
        self._link_events.join_group(RTNLGRP_LINK)
        self._vtep, self._port, self._mtu = vtep, port, mtu

    def close(self) -> None:
        self._link_events.close()

    def read(self) -> dict[str, Link]:
        """All our devices by port name, without those that wait for deletion."""
        return {
            _port_name(link): link
            for link in read_links(self._netlink)
            if link.name.startswith((PORT_PREFIX, OVERLAY_PREFIX, NETNS_PORT_PREFIX)) and link.group != REAPED_GROUP
        }

    def put_overlay(self, overlay: Overlay) -> str:
        """Create the VXLAN device of an overlay, if missing, and set it up; its name."""
        name = overlay_name(overlay.vni)
        if read_link(self._netlink, name) is None:
            self._netlink.send_batch([create_vxlan(Device(name=name, mtu=self._mtu), self._tunnel(overlay))])
        link = self._require(name)
        self._netlink.send_batch(
            [change_address_settings(link.index, link_local=False), change_link(link.index, up=True)]
        )
        return name

    def has_other_settings(self, overlay: Overlay, link: Link) -> bool:
        """Whether the device is of an agent with another `--vtep-ip` or `--vxlan-port`: nodes drop its packets."""
        return link.vxlan != self._tunnel(overlay)

    def _tunnel(self, overlay: Overlay) -> Vxlan:
        return Vxlan(vni=overlay.vni, port=self._port, local=self._vtep)

    def set_links_up(self, links: Iterable[Link]) -> list[str]:
        """Set devices up; the names of those that were down."""
        down = [link for link in links if not link.up]
        self._netlink.send_batch([change_link(link.index, up=True) for link in down])
        return [link.name for link in down]

    def check_names_free(self, config: EndpointConfig) -> None:
        """`Conflict` if the interface name exists in the pod or on the host, `NotFound` if the pod's netns is gone."""
        with pod_netns.open_netns(config, home=self._namespace) as (_, pod_netlink):
            if read_link(pod_netlink, config.interface) is not None:
                raise Conflict(f"interface {config.interface} already exists in {config.netns}", field="CNI_IFNAME")
        if read_link(self._netlink, config.port.interface) is not None:
            raise Conflict(f"host interface {config.port.interface} already exists")

    def bring_up_ports(self, configs: Iterable[EndpointConfig]) -> None:
        """Set workload ports up as soon as OVS has created them; `plug` does it for those that come late.

        ovs-vswitchd sends nothing to a device before it has seen it up. It sees that at the end of the iteration in
        which it creates the device if the device is up by then, otherwise one iteration later.
        """
        waiting = {config.port.interface: config for config in configs}
        until = time.monotonic() + _BRING_UP_S
        while (left := until - time.monotonic()) > 0:
            for _ in self._link_events.read_notifications(most=_MAX_NOTIFICATIONS):
                pass  # only a wake-up: the links are read below
            for name in [*waiting]:
                if (link := read_link(self._netlink, name)) is not None:
                    with suppress(DatapathFault):  # deleted again: `plug` reports that
                        self._bring_up(link, waiting.pop(name))
            if not waiting:
                return
            self._link_events.wait(within=left)

    def _bring_up(self, link: Link, config: EndpointConfig) -> None:
        self._disable_ipv6(link)
        request = change_link(link.index, up=True, alias=_alias(config), mac=config.port.mac, mtu=config.mtu)
        self._netlink.send_batch([request])

    def bring_up_pool_ports(self, names: Iterable[str]) -> None:
        """Set pool ports up, as far as their devices exist."""
        for name in names:
            with suppress(DatapathFault):  # deleted meanwhile: the pool replaces it
                if (link := read_link(self._netlink, name)) is not None:
                    self._disable_ipv6(link)
                    self._netlink.send_batch([change_link(link.index, up=True)])

    def _assign(self, link: Link, config: EndpointConfig) -> None:
        """Turn a pool port into a workload port. An altname makes it findable by the endpoint's interface name."""
        request = change_link(link.index, up=True, alias=_alias(config), mac=config.port.mac)
        self._netlink.send_batch([request, add_altname(link.index, config.port.interface)])

    def _disable_ipv6(self, link: Link) -> None:
        """A link-local address would add a route, and ovs-vswitchd walks all routes whenever a device changes."""
        self._namespace.write_sysctls({f"net/ipv6/conf/{link.name}/disable_ipv6": "1"})

    def plug(self, config: EndpointConfig, *, pool_port: str = "") -> bool:
        """Create the pod's end on top of a workload port, and configure it. `pool_port` names a device of the pool.

        Returns whether the workload port was up. It may be down although it was set up before: ovs-vswitchd writes back
        interface flags that it has read earlier.
        """
        with pod_netns.open_netns(config, home=self._namespace) as (namespace, pod_netlink):
            link = self._require(pool_port or config.port.interface)
            if pool_port:
                self._assign(link, config)
            elif not link.up:
                self._bring_up(link, config)
            end = Device(name=config.interface, mtu=config.mtu)
            self._netlink.send_batch([create_macvlan(end, over=link.index, namespace=namespace.fd)])
            made = read_link(pod_netlink, config.interface)
            if made is None:
                raise DatapathFault(f"interface {config.interface} disappeared after creation")
            pod_netns.configure_pod(config, made.index, namespace=namespace, pod_netlink=pod_netlink)
        return link.up

    def has_no_peer(self, link: Link, netns: str) -> bool:
        """Whether a workload port has lost the pod's end, which was in the netns at a path.

        False if that is not known: a port must not be deleted on suspicion.
        """
        # A passthru macvlan that is up puts its lower device in promiscuous mode. Most ports end here.
        if not is_internal_port(link) or link.promiscuous_users or not netns:
            return False
        try:
            with (
                Namespace.open(Path(netns)) as namespace,
                NetlinkSocket(NETLINK_ROUTE, namespace=namespace) as pod_netlink,
            ):
                return _pod_end(link, pod_netlink) is None  # the macvlan may only be down
        except (NotFound, Invalid):  # Invalid: the netns is gone, a plain file is left at its path
            return True
        except DatapathFault:
            return False

    def unplug(self, config: EndpointConfig) -> None:
        """Rename the pod's end and set it down, and mark the port for deletion; missing devices are ignored."""
        link = read_link(self._netlink, config.port.interface)
        if link is None or link.group == REAPED_GROUP:
            return
        if config.netns:
            self._release_name(config, link)
        self.mark_for_reap([link])

    def _release_name(self, config: EndpointConfig, link: Link) -> None:
        with (
            suppress(NotFound, Invalid),
            pod_netns.open_netns(config, home=self._namespace) as (_, pod_netlink),
            ignore_missing_device(),
        ):
            if index := _pod_end(link, pod_netlink):
                # The kernel renames only a device that is down.
                rename = [change_link(index, up=False), change_link(index, name=f"{DELETED_POD_LINK_PREFIX}{index}")]
                pod_netlink.send_batch([*pod_netns.deconfigure_pod(config, index), *rename])

    def mark_for_reap(self, links: Iterable[Link]) -> None:
        """Mark devices for `reap`, except those that only the OVS kernel module can delete."""
        with ignore_missing_device():
            own = [link for link in links if link.kind != _OVS_INTERNAL]
            self._netlink.send_batch([change_link(link.index, group=REAPED_GROUP) for link in own])

    def existing_names(self, names: Iterable[str]) -> set[str]:
        """The names that devices have."""
        return {name for name in names if read_link(self._netlink, name) is not None}

    def mark_named_for_reap(self, names: Iterable[str]) -> None:
        self.mark_for_reap(link for name in names if (link := read_link(self._netlink, name)) is not None)

    def reap(self) -> None:
        """Delete all marked devices with one request: the kernel takes as long for many as for one."""
        self._netlink.send_batch([delete_group(REAPED_GROUP)])

    def differences(self, config: EndpointConfig) -> list[str]:
        """What differs from the configuration at both ends, for CNI CHECK."""
        link = read_link(self._netlink, config.port.interface)
        if link is None:
            return [f"host interface {config.port.interface} is missing"]
        found = [] if link.up else [f"host interface {config.port.interface} is down"]
        try:
            with pod_netns.open_netns(config, home=self._namespace) as (_, pod_netlink):
                return [*found, *pod_netns.differences(config, pod_netlink)]
        except NotFound as error:
            return [*found, error.message]

    def converge_fdb(self, items: Iterable[FdbItem], links: Mapping[str, Link]) -> list[str]:
        """Make the FDB of overlay devices exactly these entries; a log of the changes."""
        desired = {
            entry
            for item in items
            if (link := links.get(overlay_name(item.vni))) is not None
            for entry in _fdb_entries(item, link)
        }
        ours = {link.index for link in links.values()}
        actual = {entry for entry in read_fdb(self._netlink) if entry.remote and entry.link in ours}
        self._netlink.send_batch([*map(drop_fdb_entry, actual - desired), *map(put_fdb_entry, desired - actual)])
        return [f"added {entry}" for entry in desired - actual] + [f"removed {entry}" for entry in actual - desired]

    def apply_fdb(self, *, drop: Iterable[FdbItem], put: Iterable[FdbItem]) -> None:
        """Remove and add FDB entries. Those of a deleted device are gone with it."""
        requests = [
            make(entry)
            for items, make in ((drop, drop_fdb_entry), (put, put_fdb_entry))
            for item in items
            if (link := read_link(self._netlink, overlay_name(item.vni))) is not None
            for entry in _fdb_entries(item, link)
        ]
        if requests:
            self._netlink.send_batch(requests)

    def _require(self, name: str) -> Link:
        link = read_link(self._netlink, name)
        if link is None:
            raise DatapathFault(f"device {name} disappeared after creation")
        return link


def _port_name(link: Link) -> str:
    """The name of its port: for one from the pool the altname that `_assign` added."""
    return next((name for name in link.altnames if name.startswith(PORT_PREFIX)), link.name)


def is_internal_port(link: Link) -> bool:
    """Whether OVS created the device."""
    return link.kind in {_TAP, _OVS_INTERNAL}


def _pod_end(link: Link, pod_netlink: NetlinkSocket) -> int | None:
    """The ifindex of the pod's end of a workload port, in the netns of the socket."""
    if not is_internal_port(link):
        return link.peer or None
    macvlans = (
        other.index for other in read_links(pod_netlink) if other.kind == "macvlan" and other.peer == link.index
    )
    return next(macvlans, None)


def _alias(config: EndpointConfig) -> str | None:
    """The alias that names the endpoint at its device; None if it is too long for the kernel."""
    alias = device_alias(config)
    return alias if len(alias.encode()) <= _MAX_ALIAS else None


def _fdb_entries(item: FdbItem, link: Link) -> Iterator[FdbEntry]:
    """The FDB entries of a remote endpoint, or of a node: its MACs, and the flood entry if the network floods."""
    vtep = parse_address(item.vtep, field="vtep")
    if isinstance(item, RemoteMac):
        yield FdbEntry(link=link.index, mac=item.mac, remote=vtep)
        return
    # Nodes route to the hop MAC, on a segment to the other one.
    for mac in (overlay_hop_mac(vtep), overlay_mac(vtep)):
        yield FdbEntry(link=link.index, mac=mac, remote=vtep)
    if item.floods:
        yield FdbEntry(link=link.index, mac=DEFAULT_FDB_MAC, remote=vtep)
