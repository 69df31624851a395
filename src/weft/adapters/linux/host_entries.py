"""Parts of host access in the terms of a tenant's space: routes, neighbours and entries (`hosting`), and rules."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.linux.elements import Element, interface
from weft.adapters.linux.entries import Entry
from weft.adapters.linux.hosting import HOMEWARD_MARK, INSIDE
from weft.adapters.linux.neighbours import Neighbour
from weft.adapters.linux.routes import UNREACHABLE, Prefix, Route, Rule
from weft.adapters.linux.wire import pack_address
from weft.domain.addresses import BITS, Address
from weft.domain.hosting.parts import Alias, Disguise, Door, Ground, Homeward, HostLink

HOST_MAC = "ee:ee:ee:ee:ee:e0"
HOST_HOPS = {4: Address(4, 0xA9FE0102), 6: Address(6, 0xFE80 << 112 | 2)}
"""The host as a space calls it: 169.254.1.2 and fe80::2. Nobody has these addresses: the link has two ends."""
_HOMEWARD_TABLE = 87
_WHOLE_MARK = 0xFFFFFFFF
HOMEWARD_RULES = tuple(
    Rule(family=family, priority=_HOMEWARD_TABLE, table=_HOMEWARD_TABLE, mark=HOMEWARD_MARK, mask=_WHOLE_MARK)
    for family in BITS
)


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


def ground_route(part: Ground) -> Route:
    """Whoever is there has a longer prefix; what nobody has leads nowhere."""
    return Route(to=Prefix(Address(part.subnet.family, part.subnet.base), part.subnet.length), kind=UNREACHABLE)


def homeward_route(part: Homeward, *, link: int, via: Address) -> Route:
    to = Prefix(part.address, BITS[part.address.family])
    return Route(to=to, link=link, via=via, on_link=True, table=_HOMEWARD_TABLE)


def host_entries(part: Homeward | Disguise | Alias | Door) -> Iterator[Entry]:
    """What a part is in the table."""
    match part:
        case Homeward():
            yield Entry(f"hosts{part.address.family}", Element(key=pack_address(part.address)))
        case Disguise():
            yield _guise("disguises", part.address)
        case Alias():
            value = pack_address(part.workload)
            yield Entry(f"aliases{part.address.family}", Element(key=pack_address(part.address), value=value))
        case Door():
            yield from (_guise("turns", address) for address in part.addresses)


def _guise(name: str, address: Address) -> Entry:
    """As whom something speaks beyond the link."""
    return Entry(f"{name}{address.family}", Element(key=interface(INSIDE), value=pack_address(address)))
