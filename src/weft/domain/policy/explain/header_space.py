"""Cutting services and addresses into cells within which no rule can tell one from another.

A verdict for one member of a cell is the verdict for all of it, so comparing two states cell by cell misses nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from weft.domain.addresses import BITS, Address, Range
from weft.domain.model import PodPort
from weft.domain.policy.model.protocols import ICMP, ICMPV6, MAX_PORT, PORTED, protocol_name
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import FlowRule

L = TypeVar("L")
R = TypeVar("R")


class ServiceCell(NamedTuple):
    """Ports `first` to `last` of a protocol; both 0 where it has none. `name` may stand for many protocols."""

    name: str
    protocol: int
    first: int
    last: int


def portless_protocols(rules: Iterable[FlowRule]) -> frozenset[int]:
    """The protocols without ports, beside ICMP, that some rule names."""
    named = {number for rule in rules for service in rule.services or () for number in service.protocols}
    return frozenset(named.difference(PORTED, (ICMP, ICMPV6)))


def service_cells(
    rules: Iterable[FlowRule], *, ports: Iterable[PodPort], portless: frozenset[int], version: int
) -> list[ServiceCell]:
    """Every service there is, in a fixed order, cut where a rule begins or ends and where a port has a name.

    `portless` are the protocols without ports, beside ICMP, that get a cell of their own.
    """
    cuts = {protocol: {1, MAX_PORT + 1} for protocol in PORTED}
    for service in (service for rule in rules for service in rule.services or ()):
        for protocol in service.protocols:
            if protocol in cuts:
                cuts[protocol] |= {max(service.first, 1), service.last + 1}
    for port in ports:
        if port.protocol in cuts:
            cuts[port.protocol] |= {port.port, port.port + 1}
    other = next(number for number in range(255, -1, -1) if number not in {*cuts, *portless, ICMP, ICMPV6})
    return [
        ServiceCell("icmp", ICMP if version == 4 else ICMPV6, 0, 0),
        *(ServiceCell(protocol_name(protocol), protocol, 0, 0) for protocol in sorted(portless)),
        *(
            ServiceCell(protocol_name(protocol), protocol, first, after - 1)
            for protocol, edges in cuts.items()
            for first, after in pairwise(sorted(edges))
        ),
        ServiceCell("other protocols", other, 0, 0),
    ]


def overlay(
    left: Sequence[tuple[ServiceCell, L]], right: Sequence[tuple[ServiceCell, R]]
) -> Iterator[tuple[ServiceCell, L, R]]:
    """Two ways to cut the same services, laid on each other: every piece with the value of each."""
    one, other = 0, 0
    while one < len(left):
        (cell, value), (cell_there, value_there) = left[one], right[other]
        last = min(cell.last, cell_there.last)
        yield cell._replace(first=max(cell.first, cell_there.first), last=last), value, value_there
        one += cell.last == last
        other += cell_there.last == last


def service_texts(cells: Iterable[ServiceCell]) -> tuple[str, ...]:
    """The cells in words, neighbours joined: `tcp/1-79`, `icmp`."""
    joined: list[ServiceCell] = []
    for cell in cells:
        if joined and joined[-1].name == cell.name and joined[-1].last + 1 == cell.first:
            joined[-1] = joined[-1]._replace(last=cell.last)
        else:
            joined.append(cell)
    return tuple(map(_service_text, joined))


def _service_text(cell: ServiceCell) -> str:
    if (cell.first, cell.last) in ((0, 0), (1, MAX_PORT)):
        return cell.name
    return f"{cell.name}/{cell.first}" if cell.first == cell.last else f"{cell.name}/{cell.first}-{cell.last}"


class AddressCells:
    """The address space of both families, cut at the ends of every range in some sets."""

    def __init__(self, sets: Iterable[AddressSet]) -> None:
        cuts: dict[int, set[int]] = {4: {0}, 6: {0}}
        for each in (each for addresses in sets for each in addresses.ranges):
            cuts[each.family] |= {each.first, each.last + 1}
        self._cuts = {version: sorted(edges) for version, edges in cuts.items()}

    def cell_of(self, address: Address) -> tuple[int, int]:
        """A name for the cell of this address."""
        return address.family, bisect_right(self._cuts[address.family], address.number)

    def cells(self, version: int) -> list[Range]:
        """All cells of a family, in order."""
        end = 1 << BITS[version]
        edges = [*(cut for cut in self._cuts[version] if cut < end), end]
        return [Range(version, first, after - 1) for first, after in pairwise(edges)]
