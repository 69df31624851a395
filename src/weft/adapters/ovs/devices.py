"""The machine's devices that are ports of the switch: host ends of workloads, a vxlan device for each overlay, legs.

They are in the namespace of the switch itself, and known as ours by their names. They have no addresses and MACs that
nobody speaks to: the machine's own stack has no part in what goes through them (`guard`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

from weft.adapters.linux import pod
from weft.adapters.linux.facts import REAPED_GROUP, overlay_hop_mac, overlay_mac, overlay_name
from weft.adapters.linux.judging import OVERLAY_PREFIX, PORT_PREFIX
from weft.adapters.linux.links import (
    Device,
    Link,
    Vxlan,
    alter_link,
    alter_protocols,
    create_veth,
    create_vxlan,
    delete_group,
    gone_is_fine,
    read_link,
    read_links,
)
from weft.adapters.linux.neighbours import EVERYONE, Forwarding, drop_forwarding, put_forwarding, read_forwardings
from weft.adapters.linux.netlink import NetlinkSocket
from weft.adapters.linux.netns import Namespace
from weft.adapters.ovs.legs import LEG_PREFIX
from weft.adapters.ovs.marks import owner_marks
from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Conflict, DatapathFault, NotFound
from weft.domain.nodeview import Overlay, Peer
from weft.domain.segments import Station
from weft.ports.datapath import Wiring

_LEAVING_PREFIX = "wgone"
_LONGEST_ALIAS = 255

Way = Peer | Station
"""What an overlay's device has entries for: another node, or who is there on a segment."""


class Devices:
    """See the module. `vtep` is where our tunnels end."""

    def __init__(self, namespace: Namespace, netlink: NetlinkSocket, *, vtep: Address, port: int, mtu: int) -> None:
        self._namespace = namespace
        self._netlink = netlink
        self._vtep, self._port, self._mtu = vtep, port, mtu

    def read(self) -> dict[str, Link]:
        """Those that are there to stay, by name."""
        return {
            link.name: link
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

    def keep_up(self, names: Iterable[str]) -> None:
        """Devices that the switch has taken are up: it writes back the flags it has read, perhaps before they were."""
        found = (read_link(self._netlink, name) for name in names)
        self.raise_all([link for link in found if link is not None])

    def refuse_taken(self, wiring: Wiring) -> None:
        """`Conflict` when one end's name is taken, `NotFound` when the workload's namespace is gone."""
        with pod.inside(wiring, home=self._namespace) as (_, inside):
            if read_link(inside, wiring.interface) is not None:
                raise Conflict(f"interface {wiring.interface} is in {wiring.netns} already", field="CNI_IFNAME")
        if read_link(self._netlink, wiring.port.interface) is not None:
            raise Conflict(f"the host end {wiring.port.interface} is there already")

    def plug(self, wiring: Wiring) -> None:
        """A veth pair between the switch's namespace and the workload's, whose end has all it needs."""
        name = wiring.port.interface
        with pod.inside(wiring, home=self._namespace) as (namespace, inside):
            end = Device(name=name, mtu=wiring.mtu)
            peer = Device(name=wiring.interface, mac=wiring.port.mac, mtu=wiring.mtu)
            self._netlink.send_batch([create_veth(end, peer, peer_namespace=namespace.fd)])
            link = self._find(name)
            # Else it has a route, and the switch looks at every route whenever some device changes.
            self._namespace.write_sysctls({f"net/ipv6/conf/{name}/disable_ipv6": "1"})
            self._netlink.send_batch([alter_link(link.index, up=True, alias=_alias_of(wiring))])
            pod.furnish(wiring, link.peer, namespace=namespace, inside=inside)

    def unplug(self, wiring: Wiring) -> None:
        """The workload's end is down and under another name, ours is as good as gone; gone already is fine."""
        link = read_link(self._netlink, wiring.port.interface)
        if link is None or link.group == REAPED_GROUP:
            return
        if wiring.netns:
            self._free_name(wiring, link.peer)
        self.retire([link])

    def _free_name(self, wiring: Wiring, there: int) -> None:
        with suppress(NotFound), pod.inside(wiring, home=self._namespace) as (_, inside), gone_is_fine():
            away = [alter_link(there, up=False), alter_link(there, name=f"{_LEAVING_PREFIX}{there}")]
            inside.send_batch([*pod.farewell(wiring, there), *away])

    def retire(self, links: Iterable[Link]) -> None:
        """They are as good as gone: `reap` deletes them."""
        with gone_is_fine():
            self._netlink.send_batch([alter_link(link.index, group=REAPED_GROUP) for link in links])

    def reap(self) -> None:
        self._netlink.send_batch([delete_group(REAPED_GROUP)])

    def differences(self, wiring: Wiring) -> list[str]:
        """What the wiring lacks on both ends, in words."""
        link = read_link(self._netlink, wiring.port.interface)
        if link is None:
            return [f"host end {wiring.port.interface} is missing"]
        found = [] if link.up else [f"host end {wiring.port.interface} is down"]
        try:
            with pod.inside(wiring, home=self._namespace) as (_, inside):
                return [*found, *pod.differences(wiring, inside)]
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


def _alias_of(wiring: Wiring) -> str | None:
    """What a host end is told of its owner; nothing where that is longer than an alias may be."""
    alias = " ".join(f"{name}={value}" for name, value in owner_marks(wiring).items())
    return alias if len(alias.encode()) <= _LONGEST_ALIAS else None


def _forwardings(way: Way, link: Link) -> Iterator[Forwarding]:
    """What leads to another node: its own MACs, what is said to all where that is flooded, and who is there."""
    vtep = parse_address(way.vtep, field="vtep")
    if isinstance(way, Station):
        yield Forwarding(link=link.index, mac=way.mac, remote=vtep)
        return
    for mac in (overlay_hop_mac(vtep), overlay_mac(vtep)):  # the latter on a segment
        yield Forwarding(link=link.index, mac=mac, remote=vtep)
    if way.floods:
        yield Forwarding(link=link.index, mac=EVERYONE, remote=vtep)
