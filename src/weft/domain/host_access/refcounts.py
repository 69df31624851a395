"""Parts of host access that several may ask for, kept as those who ask come and go, and what that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Set

from weft.domain.desired.diff import Difference
from weft.domain.host_access.state import HostPart


class Openings:
    """Changes are gathered by `put`; `refresh` tells what they come to. Only what is touched is looked at."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, Set[HostPart]] = {}
        self._counts: Counter[HostPart] = Counter()
        self._told: set[HostPart] = set()
        self._touched: set[HostPart] = set()

    def put(self, who: Hashable, parts: Set[HostPart]) -> None:
        """This is what somebody asks for from now on; nothing when it has gone."""
        before = self._asked.pop(who, frozenset())
        if parts:
            self._asked[who] = parts
        self._counts.subtract(before - parts)
        self._counts.update(parts - before)
        self._touched |= before ^ parts

    def refresh(self) -> Difference[HostPart]:
        """What the datapath is to be told since the last time."""
        touched, self._touched = self._touched, set()
        wanted = {part for part in touched if self._counts[part]}
        for part in touched - wanted:
            del self._counts[part]
        put, drop = wanted - self._told, (touched - wanted) & self._told
        self._told -= drop
        self._told |= put
        return Difference(tuple(put), tuple(drop))

    def parts(self) -> Iterator[HostPart]:
        """All that the datapath has been told of."""
        return iter(self._told)
