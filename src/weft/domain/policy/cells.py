"""Cutting services and addresses into cells within which no rule can tell one from another.

A verdict for one member of a cell is the verdict for all of it, so comparing two states cell by cell misses nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from weft.domain.policy.identities import PodPort
from weft.domain.policy.protocols import ICMP, ICMPV6, MAX_PORT, PORTED, protocol_name
from weft.domain.policy.ranges import Address, AddressRange, AddressSet
from weft.domain.policy.rules import FlowRule

_LAST_ADDRESS = {4: (1 << 32) - 1, 6: (1 << 128) - 1}


class ServiceCell(NamedTuple):
    """Ports `first` to `last` of a protocol; both 0 where it has none. `name` may stand for many protocols."""

    name: str
    protocol: int
    first: int
    last: int


def service_cells(rules: Iterable[FlowRule], *, ports: Iterable[PodPort], version: int) -> list[ServiceCell]:
    """Every service there is, cut where a rule begins or ends and where a port has a name."""
    own, foreign = (ICMP, ICMPV6) if version == 4 else (ICMPV6, ICMP)
    cuts = {protocol: {1, MAX_PORT + 1} for protocol in PORTED}
    portless = {own}
    for service in (service for rule in rules for service in rule.services or ()):
        for protocol in service.protocols:
            if protocol in cuts:
                cuts[protocol] |= {max(service.first, 1), service.last + 1}
            elif protocol != foreign:
                portless.add(protocol)
    for port in ports:
        if port.protocol in cuts:
            cuts[port.protocol] |= {port.port, port.port + 1}
    other = next(number for number in range(255, -1, -1) if number not in {*cuts, *portless, foreign})
    return [
        ServiceCell("icmp", own, 0, 0),
        *(ServiceCell(protocol_name(protocol), protocol, 0, 0) for protocol in sorted(portless - {own})),
        *(
            ServiceCell(protocol_name(protocol), protocol, first, after - 1)
            for protocol, edges in cuts.items()
            for first, after in pairwise(sorted(edges))
        ),
        ServiceCell("other protocols", other, 0, 0),
    ]


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
            cuts[each.version] |= {each.first, each.last + 1}
        self._cuts = {version: sorted(edges) for version, edges in cuts.items()}

    def cell_of(self, address: Address) -> tuple[int, int]:
        """A name for the cell of this address."""
        return address.version, bisect_right(self._cuts[address.version], int(address))

    def cells(self, version: int) -> list[AddressRange]:
        """All cells of a family, in order."""
        edges = [cut for cut in self._cuts[version] if cut <= _LAST_ADDRESS[version]]
        return [
            AddressRange(version, first, after - 1) for first, after in pairwise([*edges, _LAST_ADDRESS[version] + 1])
        ]
