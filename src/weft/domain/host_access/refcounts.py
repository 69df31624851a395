"""Reference counts of host-access state items that several owners may request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Set

from weft.domain.desired.diff import Difference
from weft.domain.host_access.state import HostAccessItem


class HostAccessRefcounts:
    """Collects changes with `put`; `refresh` returns their delta. Only changed items are looked at."""

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, Set[HostAccessItem]] = {}
        self._counts: Counter[HostAccessItem] = Counter()
        # The state as of the last refresh.
        self._applied: set[HostAccessItem] = set()
        self._stale: set[HostAccessItem] = set()

    def put(self, owner: Hashable, items: Set[HostAccessItem]) -> None:
        """Set the items that an owner requests; an empty set removes the owner."""
        before = self._by_owner.pop(owner, frozenset())
        if items:
            self._by_owner[owner] = items
        self._counts.subtract(before - items)
        self._counts.update(items - before)
        self._stale |= before ^ items

    def refresh(self) -> Difference[HostAccessItem]:
        """Return the delta since the last call."""
        stale, self._stale = self._stale, set()
        desired = {item for item in stale if self._counts[item]}
        for item in stale - desired:
            del self._counts[item]
        put, drop = desired - self._applied, (stale - desired) & self._applied
        self._applied -= drop
        self._applied |= put
        return Difference(tuple(put), tuple(drop))

    def state_items(self) -> Iterator[HostAccessItem]:
        """Iterate over the state as of the last refresh."""
        return iter(self._applied)
