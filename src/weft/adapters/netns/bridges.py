"""The Linux bridges of a tenant netns, one per segment: creation, ports and port flags.

No port learns MACs: the FDB is static. In proxy mode the node answers ARP and ND from its neighbour table, which holds
every workload of the segment, and floods nothing. In flood mode only ARP and neighbour solicitations are flooded
(`bridge_filter`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.adapters.netns.devices import OVERLAY_PREFIX, PORT_MAC, segment_name
from weft.adapters.netns.nft.bridge_filter import BRIDGE_SYSCTLS
from weft.domain.desired.segments import Segment
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.link import (
    Device,
    PortFlags,
    change_bridge_port,
    change_link,
    create_bridge,
    delete_link,
    read_links,
)
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace


class Bridges:
    """The bridges of one tenant netns. `indexes` are its devices by name: bridges are added and removed here."""

    def __init__(self, *, namespace: Namespace, netlink: NetlinkSocket) -> None:
        self._namespace = namespace
        self._netlink = netlink
        self._segments: dict[int, Segment] = {}

    def put(self, segment: Segment, indexes: dict[str, int], *, mtu: int) -> list[str]:
        """Ensure that the bridge exists and its ports have the segment's flags; return the repairs."""
        name = segment_name(segment.number)
        if not self._segments:
            # Before the first bridge: no frame may pass one unseen by the inet table.
            self.enable_br_netfilter()
        repaired: list[str] = []
        if name not in indexes:
            self._netlink.send_batch([create_bridge(Device(name=name, mac=PORT_MAC, mtu=mtu))])
            indexes |= {link.name: link.index for link in read_links(self._netlink) if link.name == name}
            self._netlink.send_batch([change_link(indexes[name], up=True)])
        self._segments[segment.number] = segment
        for link in read_links(self._netlink):
            flags = port_flags(link.name, floods=segment.floods)
            if link.master == indexes[name] and link.port != flags:
                repaired.append(f"set flags of port {link.name} of {name}")
                self._netlink.send_batch([change_bridge_port(link.index, flags)])
        return repaired

    def drop(self, segment: Segment, indexes: dict[str, int]) -> None:
        """Delete the bridge of a segment, unless another segment of that number was put since."""
        if self._segments.get(segment.number) == segment:
            del self._segments[segment.number]
            index = indexes.pop(segment_name(segment.number), None)
            if index is not None:
                self._netlink.send_batch([delete_link(index)])

    def repair_members(self, members: Mapping[str, int], indexes: Mapping[str, int]) -> Iterator[str]:
        """Attach devices that are on no bridge or on the wrong one; yield the repairs."""
        for link in read_links(self._netlink):
            number = members.get(link.name, 0)
            if number in self._segments and link.master != indexes[segment_name(number)]:
                yield f"attached {link.name} to {segment_name(number)}"
                self._netlink.send_batch([*self.join(link.index, link.name, number=number, indexes=indexes)])

    def join(self, link: int, name: str, *, number: int, indexes: Mapping[str, int]) -> Iterator[Request]:
        """Yield the requests that make a device a port of a segment; none if there is no such segment."""
        if number in self._segments:
            yield change_link(link, master=indexes[segment_name(number)])
            yield change_bridge_port(link, port_flags(name, floods=self._segments[number].floods))

    def enable_br_netfilter(self) -> None:
        """Pass bridged packets to the inet table, where policy is evaluated."""
        try:
            self._namespace.write_sysctls(BRIDGE_SYSCTLS)
        except DatapathFault as error:
            raise DatapathFault(
                f"bridge mode needs the kernel's br_netfilter: load that module ({error.message})"
            ) from error


def port_flags(port: str, *, floods: bool) -> PortFlags:
    """Return the bridge port flags of a device."""
    if port.startswith(OVERLAY_PREFIX):
        return PortFlags(
            learning=False,
            flood=False,
            multicast_flood=floods,
            broadcast_flood=floods,
            neighbour_suppression=not floods,
        )
    return PortFlags(
        learning=False,
        flood=False,
        multicast_flood=floods,
        broadcast_flood=floods,
        proxy_arp=not floods,
        # A workload that reaches itself through a service gets its packets back through the port they came from.
        hairpin=True,
    )
