"""Reads parts as a datapath does: addresses to numbers, numbers to outcomes, the first row that fits decides."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from weft.domain.addresses import Address, Range
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyPart

_Rows = tuple[Direction, int, int | None]


class Lookup:
    """One tenant's parts, as they are when it is made."""

    def __init__(self, parts: Iterable[PolicyPart]) -> None:
        self._who: dict[Address, int] = {}
        self._where: list[tuple[Range, int]] = []
        self._rows: dict[_Rows, list[PolicyEntry]] = {}
        for part in parts:
            match part:
                case IpIdentity():
                    self._who[part.address] = part.number
                case CidrIdentity():
                    self._where.append((part.range, part.number))
                case PolicyEntry():
                    self._rows.setdefault((part.direction, part.local, part.remote), []).append(part)
        self._where.sort()
        self._ranges = [span for span, _ in self._where]

    def number(self, address: Address) -> int:
        """Who is at an address, or 0."""
        if address in self._who:
            return self._who[address]
        index = bisect_right(self._ranges, (address.family, address.number, 1 << 128)) - 1
        return self._where[index][1] if index >= 0 and self._ranges[index].holds(address) else 0

    def outcome(self, source: int, target: int, *, direction: Direction, protocol: int, port: int) -> int | None:
        """The number of the outcome in one direction; None where the protected end has no rules."""
        local, remote = (target, source) if direction is Direction.INGRESS else (source, target)
        rows = self._rows.get((direction, local, remote), []) + self._rows.get((direction, local, None), [])
        fitting = (row for row in rows if _fits(row, protocol=protocol, port=port))
        best = min(fitting, key=_width, default=None)
        return None if best is None else best.outcome


def _fits(row: PolicyEntry, *, protocol: int, port: int) -> bool:
    return row.protocol in (None, protocol) and (row.ports is None or row.ports[0] <= port <= row.ports[1])


def _width(row: PolicyEntry) -> tuple[bool, bool, bool, bool]:
    """Less for what is asked first: the pair before everyone; one port, some ports, a protocol, everything."""
    return (
        row.remote is None,
        row.protocol is None,
        row.ports is None,
        row.ports is not None and len(set(row.ports)) > 1,
    )
