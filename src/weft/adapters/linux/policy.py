"""Policy parts as entries of the table's sets and maps (`judging`), and what has been counted there."""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.linux.elements import Element, key, mark, ordered_mark, port, protocol, read_counts
from weft.adapters.linux.entries import Entry, set_named
from weft.adapters.linux.judging import REASONS, map_name, policed_name
from weft.adapters.linux.netlink import NetlinkSocket
from weft.adapters.linux.wire import AF, pack_address, to_number
from weft.domain.addresses import Address
from weft.domain.policy.parts import PolicyPart, Row, Tally, Where, Who
from weft.domain.policy.rules import Direction

_TALLIES, _REASONS = "tallies", "reasons"
_ENDS = ("asks", "answers")
POLICY_SETS = (
    *(f"{kind}_{end}{family}" for kind in ("who", "where") for end in _ENDS for family in (4, 6)),
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
        case Who():
            element = Element(key=pack_address(part.address), value=mark(part.number))
            for end in _ENDS:
                yield Entry(f"who_{end}{part.address.family}", element)
        case Where():
            family = part.range.family
            first, last = (
                key(AF[family].to_bytes(1, "big"), pack_address(Address(family, number)))
                for number in (part.range.first, part.range.last)
            )
            element = Element(key=first, last=last, value=mark(part.number))
            for end in _ENDS:
                yield Entry(f"where_{end}{family}", element)
        case Row():
            yield _row_entry(part)
            if part.remote is None and part.protocol is None:
                yield Entry(policed_name(part.direction), Element(key=mark(part.local)))
        case Tally():
            yield Entry(_TALLIES, Element(key=mark(part.outcome)))


def _row_entry(row: Row) -> Entry:
    numbers = [row.local] if row.remote is None else [row.local, row.remote]
    paired, value = row.remote is not None, mark(row.outcome)
    if row.protocol is None:
        name = map_name(row.direction, paired=paired, service="all")
        return Entry(name, Element(key=key(*map(mark, numbers)), value=value))
    if row.ports is None:
        name = map_name(row.direction, paired=paired, service="protocol")
        return Entry(name, Element(key=key(*map(mark, numbers), protocol(row.protocol)), value=value))
    first, last = row.ports
    if first == last:
        name = map_name(row.direction, paired=paired, service="port")
        return Entry(name, Element(key=key(*map(mark, numbers), protocol(row.protocol), port(first)), value=value))
    name = map_name(row.direction, paired=paired, service="ports")
    lead = key(*map(ordered_mark, numbers), protocol(row.protocol))
    return Entry(name, Element(key=key(lead, port(first)), last=key(lead, port(last)), value=value))


def read_tallies(netlink: NetlinkSocket) -> tuple[dict[int, int], dict[str, int]]:
    """How many packets met each outcome, and each reason of our own."""
    outcomes, reasons = (
        {to_number(number): count.packets for number, count in read_counts(netlink, set_named(name)).items()}
        for name in (_TALLIES, _REASONS)
    )
    return outcomes, {REASONS[number]: count for number, count in reasons.items() if number in REASONS}
