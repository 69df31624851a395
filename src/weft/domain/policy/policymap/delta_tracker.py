"""The desired policy state items of a tenant, and the delta since it was last read."""

from __future__ import annotations

from collections.abc import Set

from weft.domain.desired.diff import Difference
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyItem, VerdictCounter


class DeltaTracker:
    """A set of state items that records how it differs from its content at the last `take_delta`."""

    def __init__(self) -> None:
        self._items: set[PolicyItem] = set()
        self._added: set[PolicyItem] = set()
        self._removed: set[PolicyItem] = set()

    @property
    def state_items(self) -> Set[PolicyItem]:
        return self._items

    def put(self, item: PolicyItem) -> None:
        """Add an item that is absent."""
        self._items.add(item)
        # An item that is removed and added again between two deltas must not reach the datapath at all.
        if item in self._removed:
            self._removed.discard(item)
        else:
            self._added.add(item)

    def drop(self, item: PolicyItem) -> None:
        """Remove an item that is present."""
        self._items.discard(item)
        if item in self._added:
            self._added.discard(item)
        else:
            self._removed.add(item)

    def take_delta(self) -> Difference[PolicyItem]:
        """Return the difference since the last call, in a fixed order: referenced items first."""
        delta = Difference(tuple(_ordered(self._added)), tuple(reversed(_ordered(self._removed))))
        self._added.clear()
        self._removed.clear()
        return delta


def _ordered(items: Set[PolicyItem]) -> list[PolicyItem]:
    # Counters come first because entries refer to them. Identities come last: a packet that gets its identity must
    # already find the entries for it.
    counters = sorted((item for item in items if type(item) is VerdictCounter), key=lambda item: item.verdict_id)
    entries = sorted((item for item in items if type(item) is PolicyEntry), key=_entry_order)
    ranges = sorted((item for item in items if type(item) is CidrIdentity), key=lambda item: item.range)
    addresses = sorted((item for item in items if type(item) is IpIdentity), key=lambda item: item.address)
    return [*counters, *entries, *ranges, *addresses]


def _entry_order(entry: PolicyEntry) -> int:
    # One number, because there may be very many entries: comparing tuples takes several times as long.
    group = entry.local << 33 | (0 if entry.remote is None else entry.remote + 1)
    l4 = (0 if entry.protocol is None else entry.protocol + 1) << 17 | (
        0 if entry.ports is None else entry.ports[0] + 1
    )
    return (entry.direction is Direction.INGRESS) << 96 | group << 27 | l4
