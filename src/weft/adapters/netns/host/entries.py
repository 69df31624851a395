"""Parts of host access in the terms of a tenant's space: routes, neighbours and entries (`hosting`), and rules."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.netns.nft.entries import Entry
from weft.adapters.netns.nft.policy_chains import INSIDE
from weft.domain.addresses import Address
from weft.domain.host_access.state import (
    HostLink,
    NodePortVip,
    OverlapDnat,
    RemoteHostReturnRoute,
    TenantSnat,
    TenantSubnet,
)
from weft.kernel.netlink.codec import pack_address
from weft.kernel.netlink.neigh import Neighbour
from weft.kernel.netlink.nft_set import Element, interface, mark
from weft.kernel.netlink.route import UNREACHABLE, Prefix, Route

HOST_MAC = "ee:ee:ee:ee:ee:e0"
# The host as a space calls it: 169.254.1.2 and fe80::2. Nobody has these addresses: the link has two ends.
HOST_HOPS = {4: Address(4, 0xA9FE0102), 6: Address(6, 0xFE80 << 112 | 2)}


def link_neighbours(link: int) -> Iterator[Neighbour]:
    """Who is at the other end."""
    for hop in HOST_HOPS.values():
        yield Neighbour(link=link, address=hop, mac=HOST_MAC)


def link_routes(link: int) -> Iterator[Route]:
    """The way out."""
    for family, hop in HOST_HOPS.items():
        yield Route(to=Prefix(Address(family, 0), 0), link=link, via=hop, on_link=True)


def link_entries(part: HostLink) -> Iterator[Entry]:
    """As whom the host speaks, and so whoever came by it and goes on to another node."""
    for address in part.addresses:
        yield Entry(f"own{address.family}", Element(key=pack_address(address)))
        yield _guise("outward", address)


def ground_route(part: TenantSubnet) -> Route:
    """Whoever is there has a longer prefix; what nobody has leads nowhere."""
    return Route(to=Prefix(Address(part.subnet.family, part.subnet.base), part.subnet.length), kind=UNREACHABLE)


def homeward_entries(part: RemoteHostReturnRoute, *, link: int) -> Iterator[Entry]:
    """Whom to answer by which device."""
    address = pack_address(part.address)
    yield Entry(f"hosts{part.address.family}", Element(key=address))
    yield Entry(f"homes{part.address.family}", Element(key=address, value=mark(link)))


def host_entries(part: TenantSnat | OverlapDnat | NodePortVip) -> Iterator[Entry]:
    """What a part is in the table."""
    match part:
        case TenantSnat():
            yield _guise("disguises", part.address)
        case OverlapDnat():
            value = pack_address(part.workload)
            yield Entry(f"aliases{part.address.family}", Element(key=pack_address(part.address), value=value))
        case NodePortVip():
            yield from (_guise("turns", address) for address in part.addresses)


def _guise(name: str, address: Address) -> Entry:
    """As whom something speaks beyond the link."""
    return Entry(f"{name}{address.family}", Element(key=interface(INSIDE), value=pack_address(address)))
