"""The bridges of a tenant's space, one for each segment: made, joined by ports, and told how to treat them.

No port learns: where a MAC is, is written down. A node that answers for others does so by its neighbour table, which
has everybody of a segment, and floods nothing. One that floods does so with questions only (`bridging`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.adapters.netns.kernel_state import PORT_MAC, segment_name
from weft.adapters.netns.nft.bridge_filter import BRIDGE_SYSCTLS
from weft.adapters.netns.nft.policy_chains import OVERLAY_PREFIX
from weft.domain.desired.segments import Segment
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.link import Device, PortFlags, alter_link, alter_port, create_bridge, delete_link, read_links
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace


class Bridges:
    """The segments of one space. `indexes` are always those of its devices by name: bridges come and go here."""

    def __init__(self, *, namespace: Namespace, netlink: NetlinkSocket) -> None:
        self._namespace = namespace
        self._netlink = netlink
        self._segments: dict[int, Segment] = {}

    def put(self, segment: Segment, indexes: dict[str, int], *, mtu: int) -> list[str]:
        """The bridge is there, and treats its ports as the segment says; what had to be mended."""
        name = segment_name(segment.number)
        if not self._segments:
            self.show_packets()
        repaired: list[str] = []
        if name not in indexes:
            self._netlink.send_batch([create_bridge(Device(name=name, mac=PORT_MAC, mtu=mtu))])
            indexes |= {link.name: link.index for link in read_links(self._netlink) if link.name == name}
            self._netlink.send_batch([alter_link(indexes[name], up=True)])
        self._segments[segment.number] = segment
        for link in read_links(self._netlink):
            flags = flags_of(link.name, floods=segment.floods)
            if link.master == indexes[name] and link.port != flags:
                repaired.append(f"told port {link.name} of {name} how it is treated")
                self._netlink.send_batch([alter_port(link.index, flags)])
        return repaired

    def drop(self, segment: Segment, indexes: dict[str, int]) -> None:
        """No such segment; one that was put anew since stays."""
        if self._segments.get(segment.number) == segment:
            del self._segments[segment.number]
            index = indexes.pop(segment_name(segment.number), None)
            if index is not None:
                self._netlink.send_batch([delete_link(index)])

    def gather(self, members: Mapping[str, int], indexes: Mapping[str, int]) -> Iterator[str]:
        """Bring devices that are on no segment, or on another, to where they belong; what was mended."""
        for link in read_links(self._netlink):
            number = members.get(link.name, 0)
            if number in self._segments and link.master != indexes[segment_name(number)]:
                yield f"put {link.name} on {segment_name(number)}"
                self._netlink.send_batch([*self.join(link.index, link.name, number=number, indexes=indexes)])

    def join(self, link: int, name: str, *, number: int, indexes: Mapping[str, int]) -> Iterator[Request]:
        """What makes a device a port of a segment; nothing where there is no such segment."""
        if number in self._segments:
            yield alter_link(link, master=indexes[segment_name(number)])
            yield self.treat(link, name, number=number)

    def treat(self, link: int, name: str, *, number: int) -> Request:
        """What tells the bridge how to treat a port."""
        return alter_port(link, flags_of(name, floods=self._segments[number].floods))

    def show_packets(self) -> None:
        """What passes a bridge is shown to the tenant's table, where it is judged."""
        try:
            self._namespace.write_sysctls(BRIDGE_SYSCTLS)
        except DatapathFault as error:
            raise DatapathFault(
                f"bridge mode needs the kernel's br_netfilter: load that module ({error.message})"
            ) from error


def flags_of(port: str, *, floods: bool) -> PortFlags:
    """How a bridge treats a port. Who reaches himself through a service gets his own packets back."""
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
        hairpin=True,
    )
