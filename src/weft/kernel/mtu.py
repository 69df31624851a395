"""The MTU of workloads, from the MTU of the underlay."""

from __future__ import annotations

from weft.domain.addresses import Address
from weft.kernel.netlink.link import read_links
from weft.kernel.netlink.route import read_addresses
from weft.kernel.netlink.socket import NetlinkSocket

# VXLAN overhead by the underlay's family: outer IP, UDP 8, VXLAN 8, inner Ethernet 14.
_ENCAPSULATION = {4: 50, 6: 70}
_DEFAULT_MTU = 1500


def workload_mtu(underlay: NetlinkSocket, vtep: Address) -> int:
    """Return the MTU inside a VXLAN tunnel whose VTEP is an address of this machine."""
    for link in read_links(underlay):
        if any(each.prefix.address == vtep for each in read_addresses(underlay, link=link.index)):
            return link.mtu - _ENCAPSULATION[vtep.family]
    return _DEFAULT_MTU - _ENCAPSULATION[vtep.family]
