"""Policy parts as entries of the table's sets and maps (`judging`), and what has been counted there."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.netns.nft.entries import Entry, set_named
from weft.adapters.netns.nft.policy_chains import REASONS, map_name, policed_name
from weft.adapters.netns.nft.prefix_lookup import prefix_key, prefixes
from weft.domain.addresses import BITS, Address
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyPart, VerdictCounter
from weft.kernel.netlink.codec import pack_address, to_number
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol, read_counts
from weft.kernel.netlink.socket import NetlinkSocket

_TALLIES, _REASONS = "tallies", "reasons"
_ENDS = ("asks", "answers")
_PORT_BITS = 16
POLICY_SETS = (
    *(f"{kind}_{end}{family}" for kind in ("who", "spot", "where") for end in _ENDS for family in (4, 6)),
    *(policed_name(direction) for direction in Direction),
    *(
        map_name(direction, paired=paired, service=service)
        for direction in Direction
        for paired in (True, False)
        for service in ("port", "ports", "protocol", "all")
    ),
    _TALLIES,
)


def entries_of(part: PolicyPart) -> Iterator[Entry]:
    """What a part consists of. No two parts that may be there together have an entry in common."""
    match part:
        case IpIdentity():
            element = Element(key=pack_address(part.address), value=mark(part.number))
            for end in _ENDS:
                yield Entry(f"who_{end}{part.address.family}", element)
        case CidrIdentity():
            family, value = part.range.family, mark(part.number)
            for first, free in prefixes(part.range.first, part.range.last, bits=BITS[family]):
                name, number = ("where", prefix_key(first, free)) if free else ("spot", first)
                element = Element(key=pack_address(Address(family, number)), value=value)
                for end in _ENDS:
                    yield Entry(f"{name}_{end}{family}", element)
        case PolicyEntry():
            yield from _row_entries(part)
            if part.remote is None and part.protocol is None:
                yield Entry(policed_name(part.direction), Element(key=mark(part.local)))
        case VerdictCounter():
            yield Entry(_TALLIES, Element(key=mark(part.outcome)))


def _row_entries(row: PolicyEntry) -> Iterator[Entry]:
    numbers = [row.local] if row.remote is None else [row.local, row.remote]
    lead, value = [*map(mark, numbers)], mark(row.outcome)
    if row.protocol is None:
        yield Entry(_row_map(row, "all"), Element(key=key(*lead), value=value))
        return
    lead.append(protocol(row.protocol))
    if row.ports is None:
        yield Entry(_row_map(row, "protocol"), Element(key=key(*lead), value=value))
        return
    for first, free in prefixes(*row.ports, bits=_PORT_BITS):
        service, number = ("ports", prefix_key(first, free)) if free else ("port", first)
        yield Entry(_row_map(row, service), Element(key=key(*lead, port(number)), value=value))


def _row_map(row: PolicyEntry, service: str) -> str:
    return map_name(row.direction, paired=row.remote is not None, service=service)


def read_tallies(netlink: NetlinkSocket) -> tuple[dict[int, int], dict[str, int]]:
    """How many packets met each outcome, and each reason of our own."""
    outcomes, reasons = (
        {to_number(number): count.packets for number, count in read_counts(netlink, set_named(name)).items()}
        for name in (_TALLIES, _REASONS)
    )
    return outcomes, {REASONS[number]: count for number, count in reasons.items() if number in REASONS}
