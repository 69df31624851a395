"""The desired policy state items of a tenant, and the delta since it was last read."""

from __future__ import annotations

from collections.abc import Set

from weft.domain.desired.diff import Difference
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
        delta = Difference(
            tuple(sorted(self._added, key=_order)), tuple(sorted(self._removed, key=_order, reverse=True))
        )
        self._added.clear()
        self._removed.clear()
        return delta


def _order(item: PolicyItem) -> tuple[object, ...]:
    # Counters come first because entries refer to them. Identities come last: a packet that gets its identity must
    # already find the entries for it.
    match item:
        case VerdictCounter():
            return 0, item.verdict_id
        case PolicyEntry():
            l4 = -1 if item.protocol is None else item.protocol, item.ports or (-1, -1)
            return 1, item.direction, item.local, item.remote is not None, item.remote or 0, *l4
        case CidrIdentity():
            return 2, item.range
        case IpIdentity():
            return 3, item.address
