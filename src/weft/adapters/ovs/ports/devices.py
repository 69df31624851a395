"""The machine's devices that are ports of the switch: host ends of workloads, a vxlan device for each overlay, legs.

They are in the namespace of the switch itself, and known as ours by their names. They have no addresses: the machine's
own stack has no part in what goes through them (`guard`).

The switch makes host ends and legs itself, as internal ports, and a macvlan stands on each, in the namespace it leads
to. Where the switch forwards in its own process that is a tap, which it asks for packets at a fraction of what a veth
costs it, whether there are any or not (docs/adr/0012). Host ends that older agents made are veths, and stay so.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from weft.adapters.netns import pod_netns
from weft.adapters.netns.kernel_state import REAPED_GROUP, overlay_hop_mac, overlay_mac, overlay_name
from weft.adapters.netns.nft.policy_chains import OVERLAY_PREFIX, PORT_PREFIX
from weft.adapters.ovs.ovsdb.external_ids import owner_marks
from weft.adapters.ovs.pipeline.tenant_netns_flows import LEG_PREFIX
from weft.domain.addresses import Address, parse_address
from weft.domain.desired.segments import RemoteMac
from weft.domain.desired.state import Overlay, VxlanPeer
from weft.domain.errors import Conflict, DatapathFault, Invalid, NotFound
from weft.kernel.netlink.link import (
    LINKS,
    Device,
    Link,
    Vxlan,
    add_name,
    alter_link,
    alter_protocols,
    create_macvlan,
    create_vxlan,
    delete_group,
    gone_is_fine,
    read_link,
    read_links,
)
from weft.kernel.netlink.neigh import EVERYONE, Forwarding, drop_forwarding, put_forwarding, read_forwardings
from weft.kernel.netlink.socket import ROUTE, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.ports.datapath import EndpointConfig

_LEAVING_PREFIX = "wgone"
_LONGEST_ALIAS = 255
_SOON_S, _MOST_NEWS = 1.0, 1000
# What the kernel calls the internal ports of a switch: of its own process, and of the kernel's module.
_TAP, _KERNELS_OWN = "tun", "openvswitch"

# What an overlay's device has entries for: another node, or who is there on a segment.
Way = VxlanPeer | RemoteMac


class Devices:
    """See the module. `vtep` is where our tunnels end."""

    def __init__(self, namespace: Namespace, netlink: NetlinkSocket, *, vtep: Address, port: int, mtu: int) -> None:
        self._namespace = namespace
        self._netlink = netlink
        self._news = NetlinkSocket(ROUTE, namespace=namespace)
        self._news.join(LINKS)
        self._vtep, self._port, self._mtu = vtep, port, mtu

    def close(self) -> None:
        self._news.close()

    def read(self) -> dict[str, Link]:
        """Those that are there to stay, by what they are known by."""
        return {
            _known_as(link): link
            for link in read_links(self._netlink)
            if link.name.startswith((PORT_PREFIX, OVERLAY_PREFIX, LEG_PREFIX)) and link.group != REAPED_GROUP
        }

    def put_overlay(self, overlay: Overlay) -> str:
        """The name of the overlay's device, which is there and up."""
        name = overlay_name(overlay.vni)
        if read_link(self._netlink, name) is None:
            tunnel = Vxlan(vni=overlay.vni, port=self._port, local=self._vtep)
            self._netlink.send_batch([create_vxlan(Device(name=name, mtu=self._mtu), tunnel)])
        link = self._find(name)
        self._netlink.send_batch([alter_protocols(link.index, link_local=False), alter_link(link.index, up=True)])
        return name

    def raise_all(self, links: Iterable[Link]) -> list[str]:
        """All are up; the names of those that were not."""
        down = [link for link in links if not link.up]
        self._netlink.send_batch([alter_link(link.index, up=True) for link in down])
        return [link.name for link in down]

    def refuse_taken(self, wiring: EndpointConfig) -> None:
        """`Conflict` when one end's name is taken, `NotFound` when the workload's namespace is gone."""
        with pod_netns.inside(wiring, home=self._namespace) as (_, inside):
            if read_link(inside, wiring.interface) is not None:
                raise Conflict(f"interface {wiring.interface} is in {wiring.netns} already", field="CNI_IFNAME")
        if read_link(self._netlink, wiring.port.interface) is not None:
            raise Conflict(f"the host end {wiring.port.interface} is there already")

    def raise_made(self, wirings: Iterable[EndpointConfig]) -> None:
        """Raise host ends as soon as the switch has made them; what does not come soon is left to `plug`.

        The switch sends nothing to a device before it has heard that it is up. That it hears as soon as it is done with
        the round in which it makes the device, and else after its next one.
        """
        waiting = {wiring.port.interface: wiring for wiring in wirings}
        until = time.monotonic() + _SOON_S
        while (left := until - time.monotonic()) > 0:
            for _ in self._news.read_unasked(most=_MOST_NEWS):
                pass  # that there are some says enough
            for name in [*waiting]:
                if (link := read_link(self._netlink, name)) is not None:
                    with suppress(DatapathFault):  # it is gone again: whoever is to be joined to it finds out
                        self._raise(link, waiting.pop(name))
            if not waiting:
                return
            self._news.wait(within=left)

    def _raise(self, link: Link, wiring: EndpointConfig) -> None:
        self._refuse_addresses(link)
        told = alter_link(link.index, up=True, alias=_alias_of(wiring), mac=wiring.port.mac, mtu=wiring.mtu)
        self._netlink.send_batch([told])

    def raise_spares(self, names: Iterable[str]) -> None:
        """Raise host ends of nobody, as far as they are there."""
        for name in names:
            with suppress(DatapathFault):  # as above
                if (link := read_link(self._netlink, name)) is not None:
                    self._refuse_addresses(link)
                    self._netlink.send_batch([alter_link(link.index, up=True)])

    def _hand_over(self, link: Link, wiring: EndpointConfig) -> None:
        """A host end of nobody is that of a workload, and known by its name."""
        told = alter_link(link.index, up=True, alias=_alias_of(wiring), mac=wiring.port.mac)
        self._netlink.send_batch([told, add_name(link.index, wiring.port.interface)])

    def _refuse_addresses(self, link: Link) -> None:
        """Else it has a route, and the switch looks at every route whenever some device changes."""
        self._namespace.write_sysctls({f"net/ipv6/conf/{link.name}/disable_ipv6": "1"})

    def plug(self, wiring: EndpointConfig, *, spare: str = "") -> bool:
        """Join a workload to its host end, which the switch has made; the workload's end has all it needs.

        Whether the host end was up by now. It may be down again: the switch writes back flags that it has read before.
        One that was made in advance is still called otherwise.
        """
        with pod_netns.inside(wiring, home=self._namespace) as (namespace, inside):
            link = self._find(spare or wiring.port.interface)
            if spare:
                self._hand_over(link, wiring)
            elif not link.up:
                self._raise(link, wiring)
            end = Device(name=wiring.interface, mtu=wiring.mtu)
            self._netlink.send_batch([create_macvlan(end, over=link.index, namespace=namespace.fd)])
            made = read_link(inside, wiring.interface)
            if made is None:
                raise DatapathFault(f"interface {wiring.interface} is gone as soon as it was made")
            pod_netns.configure_pod(wiring, made.index, namespace=namespace, inside=inside)
        return link.up

    def has_no_peer(self, link: Link, netns: str) -> bool:
        """Whether a host end has lost the workload's end, which was in the namespace at a path.

        Where that is not known, nothing has been lost.
        """
        if not has_macvlan(link) or link.listeners or not netns:
            return False
        try:
            with Namespace.open(Path(netns)) as namespace, NetlinkSocket(ROUTE, namespace=namespace) as inside:
                return _end_of(link, inside) is None  # it may only be down
        except (NotFound, Invalid):  # a file is left where the namespace was
            return True
        except DatapathFault:
            return False

    def unplug(self, wiring: EndpointConfig) -> None:
        """The workload's end is down and under another name, ours is as good as gone; gone already is fine."""
        link = read_link(self._netlink, wiring.port.interface)
        if link is None or link.group == REAPED_GROUP:
            return
        if wiring.netns:
            self._free_name(wiring, link)
        self.retire([link])

    def _free_name(self, wiring: EndpointConfig, link: Link) -> None:
        with suppress(NotFound, Invalid), pod_netns.inside(wiring, home=self._namespace) as (_, inside), gone_is_fine():
            if there := _end_of(link, inside):
                away = [alter_link(there, up=False), alter_link(there, name=f"{_LEAVING_PREFIX}{there}")]
                inside.send_batch([*pod_netns.deconfigure_pod(wiring, there), *away])

    def retire(self, links: Iterable[Link]) -> None:
        """They are as good as gone: `reap` deletes them, but those that only the switch can delete."""
        with gone_is_fine():
            own = [link for link in links if link.kind != _KERNELS_OWN]
            self._netlink.send_batch([alter_link(link.index, group=REAPED_GROUP) for link in own])

    def are_there(self, names: Iterable[str]) -> set[str]:
        """Those of some names that devices have."""
        return {name for name in names if read_link(self._netlink, name) is not None}

    def retire_named(self, names: Iterable[str]) -> None:
        self.retire(link for name in names if (link := read_link(self._netlink, name)) is not None)

    def reap(self) -> None:
        self._netlink.send_batch([delete_group(REAPED_GROUP)])

    def differences(self, wiring: EndpointConfig) -> list[str]:
        """What the wiring lacks on both ends, in words."""
        link = read_link(self._netlink, wiring.port.interface)
        if link is None:
            return [f"host end {wiring.port.interface} is missing"]
        found = [] if link.up else [f"host end {wiring.port.interface} is down"]
        try:
            with pod_netns.inside(wiring, home=self._namespace) as (_, inside):
                return [*found, *pod_netns.differences(wiring, inside)]
        except NotFound as error:
            return [*found, error.message]

    def converge_ways(self, ways: Iterable[Way], links: Mapping[str, Link]) -> list[str]:
        """The overlays' devices know exactly these ways to other nodes; what was done, in words."""
        wanted = {
            each
            for way in ways
            if (link := links.get(overlay_name(way.vni))) is not None
            for each in _forwardings(way, link)
        }
        ours = {link.index for link in links.values()}
        actual = {each for each in read_forwardings(self._netlink) if each.remote and each.link in ours}
        self._netlink.send_batch([*map(drop_forwarding, actual - wanted), *map(put_forwarding, wanted - actual)])
        return [f"added {each}" for each in wanted - actual] + [f"removed {each}" for each in actual - wanted]

    def change_ways(self, *, drop: Iterable[Way], put: Iterable[Way]) -> None:
        """No more of some ways, and others; those of a device that is gone went with it."""
        requests = [
            make(each)
            for ways, make in ((drop, drop_forwarding), (put, put_forwarding))
            for way in ways
            if (link := read_link(self._netlink, overlay_name(way.vni))) is not None
            for each in _forwardings(way, link)
        ]
        if requests:
            self._netlink.send_batch(requests)

    def _find(self, name: str) -> Link:
        link = read_link(self._netlink, name)
        if link is None:
            raise DatapathFault(f"device {name} is gone as soon as it was made")
        return link


def _known_as(link: Link) -> str:
    """Its name, or that of the host end which it has become (`hand_over`)."""
    return next((name for name in link.other_names if name.startswith(PORT_PREFIX)), link.name)


def has_macvlan(link: Link) -> bool:
    """Whether the switch has made a device."""
    return link.kind in {_TAP, _KERNELS_OWN}


def _end_of(link: Link, inside: NetlinkSocket) -> int | None:
    """The index of the other end of a host end, in the namespace of a socket."""
    if not has_macvlan(link):
        return link.peer or None
    stands = (each.index for each in read_links(inside) if each.kind == "macvlan" and each.peer == link.index)
    return next(stands, None)


def _alias_of(wiring: EndpointConfig) -> str | None:
    """What a host end is told of its owner; nothing where that is longer than an alias may be."""
    alias = " ".join(f"{name}={value}" for name, value in owner_marks(wiring).items())
    return alias if len(alias.encode()) <= _LONGEST_ALIAS else None


def _forwardings(way: Way, link: Link) -> Iterator[Forwarding]:
    """What leads to another node: its own MACs, what is said to all where that is flooded, and who is there."""
    vtep = parse_address(way.vtep, field="vtep")
    if isinstance(way, RemoteMac):
        yield Forwarding(link=link.index, mac=way.mac, remote=vtep)
        return
    for mac in (overlay_hop_mac(vtep), overlay_mac(vtep)):  # the latter on a segment
        yield Forwarding(link=link.index, mac=mac, remote=vtep)
    if way.floods:
        yield Forwarding(link=link.index, mac=EVERYONE, remote=vtep)
