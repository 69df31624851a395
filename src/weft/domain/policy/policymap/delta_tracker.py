"""The parts that are wanted, and what was put and dropped since somebody last took note."""

from __future__ import annotations

from collections.abc import Set

from weft.domain.desired.diff import Difference
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyPart, VerdictCounter


class DeltaTracker:
    """A set of parts that knows how it differs from what it was at the last `take`."""

    def __init__(self) -> None:
        self._parts: set[PolicyPart] = set()
        self._put: set[PolicyPart] = set()
        self._dropped: set[PolicyPart] = set()

    @property
    def parts(self) -> Set[PolicyPart]:
        return self._parts

    def put(self, part: PolicyPart) -> None:
        """Add a part that is not there."""
        self._parts.add(part)
        if part in self._dropped:
            self._dropped.discard(part)
        else:
            self._put.add(part)

    def drop(self, part: PolicyPart) -> None:
        """Remove a part that is there."""
        self._parts.discard(part)
        if part in self._put:
            self._put.discard(part)
        else:
            self._dropped.add(part)

    def take(self) -> Difference[PolicyPart]:
        """The difference since the last call, in a fixed order in which what is referred to is there first."""
        difference = Difference(
            tuple(sorted(self._put, key=_order)), tuple(sorted(self._dropped, key=_order, reverse=True))
        )
        self._put.clear()
        self._dropped.clear()
        return difference


def _order(part: PolicyPart) -> tuple[object, ...]:
    match part:
        case VerdictCounter():
            return 0, part.outcome
        case PolicyEntry():
            service = -1 if part.protocol is None else part.protocol, part.ports or (-1, -1)
            return 1, part.direction, part.local, part.remote is not None, part.remote or 0, *service
        case CidrIdentity():
            return 2, part.range
        case IpIdentity():
            return 3, part.address
