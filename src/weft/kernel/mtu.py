"""What the network between the nodes means for workloads."""

from __future__ import annotations

from weft.domain.addresses import Address
from weft.kernel.netlink.link import read_links
from weft.kernel.netlink.route import read_addresses
from weft.kernel.netlink.socket import NetlinkSocket

# What vxlan adds to a packet, by the underlay's family.
_ENCAPSULATION = {4: 50, 6: 70}
_DEFAULT_MTU = 1500


def workload_mtu(underlay: NetlinkSocket, vtep: Address) -> int:
    """What fits into a tunnel that ends at an address of this machine."""
    for link in read_links(underlay):
        if any(each.prefix.address == vtep for each in read_addresses(underlay, link=link.index)):
            return link.mtu - _ENCAPSULATION[vtep.family]
    return _DEFAULT_MTU - _ENCAPSULATION[vtep.family]
