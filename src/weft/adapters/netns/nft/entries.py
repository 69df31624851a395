"""Elements of the nft sets and maps of a tenant netns, and the table that each set belongs to.

An entry is put, dropped and read back the same way whichever table it is in. Set names are unique over the tables.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from weft.kernel.netlink.codec import Request, to_address, to_int, to_mac, to_text
from weft.kernel.netlink.nft_set import Element, SetName, drop_elements, put_elements, read_elements
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.uapi.nf_tables import NFPROTO_BRIDGE, NFPROTO_INET, NFPROTO_NETDEV

# The tables of a tenant netns: inet for everything that is IP, bridge for frames between ports of a bridge, netdev for
# the egress of the link to the host.
TABLE: Final = "weft"
BRIDGE_TABLE: Final = "weft"
NETDEV_TABLE: Final = "weft"

L3_SPOOFGUARD_SETS: Final = ("l3_spoofguard4", "l3_spoofguard6")
HAIRPIN_SELF_SETS: Final = ("hairpin_self4", "hairpin_self6")
# The sets and maps of the bridge table.
BRIDGE_SETS: Final = ("l2_spoofguard4", "l2_spoofguard6", "nd_owners", "ns_target_mac", "local_ips4", "local_ips6")
# The maps of the netdev table.
RETURN_IFINDEX_MAPS: Final = ("return_ifindex4", "return_ifindex6")

# Sets whose key is an interface, a MAC and an address.
_SPOOFGUARD_SETS: Final = (*L3_SPOOFGUARD_SETS, *BRIDGE_SETS[:3])


class Entry(NamedTuple):
    """An element, and the set or map it is in."""

    name: str
    element: Element

    @property
    def location(self) -> tuple[str, bytes]:
        """Set and key: what identifies the entry, whatever its value."""
        return self.name, self.element.key

    def __str__(self) -> str:
        if self.name in _SPOOFGUARD_SETS:
            # An interface name has 16 bytes; a MAC has 6 and is padded to 8, as every field of a concatenation is
            # padded to 4 bytes.
            name, mac, address = self.element.key[:16], self.element.key[16:22], self.element.key[24:]
            return f"{to_text(name)} with {to_mac(mac)} and {to_address(address)} in {self.name}"
        value = f" as {to_int(self.element.value):#x}" if self.element.value else ""
        return f"{self.element.key.hex()}{value} in {self.name}"


def set_named(name: str) -> SetName:
    """Return a set or map with its table."""
    if name in RETURN_IFINDEX_MAPS:
        return SetName(NFPROTO_NETDEV, NETDEV_TABLE, name)
    return SetName(NFPROTO_BRIDGE, BRIDGE_TABLE, name) if name in BRIDGE_SETS else SetName(NFPROTO_INET, TABLE, name)


def put_entries(entries: Iterable[Entry]) -> list[Request]:
    """Return the requests that add entries."""
    by_set = _by_set(entries)
    return [request for name, elements in by_set.items() for request in put_elements(set_named(name), elements)]


def drop_entries(entries: Iterable[Entry]) -> list[Request]:
    """Return the requests that delete entries."""
    by_set = _by_set(entries)
    return [request for name, elements in by_set.items() for request in drop_elements(set_named(name), elements)]


def read_entries(netlink: NetlinkSocket, names: Iterable[str]) -> Iterator[Entry]:
    """Yield everything in these sets and maps; `NetlinkError` with `ENOENT` if one does not exist."""
    for name in names:
        for element in read_elements(netlink, set_named(name)):
            yield Entry(name, element)


def _by_set(entries: Iterable[Entry]) -> dict[str, list[Element]]:
    elements: defaultdict[str, list[Element]] = defaultdict(list)
    for entry in entries:
        elements[entry.name].append(entry.element)
    return elements
