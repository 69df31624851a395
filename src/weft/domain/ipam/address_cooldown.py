"""Cooldown of released addresses: peers may still have the old holder in their ARP caches and conntrack tables."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from weft.domain.addresses import Address
from weft.domain.ids import NetworkKey
from weft.domain.ipam.allocator import NumberSet

# Linux keeps a stale neighbour entry for up to a minute (gc_stale_time).
COOLDOWN_S = 60.0

Pool = tuple[NetworkKey, int]


class Cooldown:
    """Recently released addresses by network and family. Kept in memory only: the cooldown is best effort."""

    def __init__(self, *, duration: float = COOLDOWN_S) -> None:
        self._duration = duration
        # In order of expiry, because every address has the same duration.
        self._order: deque[tuple[float, Pool, int]] = deque()
        self._last: dict[tuple[Pool, int], float] = {}
        self._numbers: defaultdict[Pool, NumberSet] = defaultdict(NumberSet)

    def add(self, network: NetworkKey, address: Address, *, now: float) -> None:
        """Start the cooldown of an address that is released at `now`."""
        pool, until = (network, address.family), now + self._duration
        self._numbers[pool].add(address.number)
        self._last[pool, address.number] = until
        self._order.append((until, pool, address.number))

    def active(self, now: float) -> Mapping[Pool, NumberSet]:
        """The addresses whose cooldown has not ended at `now`."""
        while self._order and self._order[0][0] <= now:
            until, pool, number = self._order.popleft()
            # An address that was released again meanwhile has a later entry of its own.
            if self._last.get((pool, number)) == until:
                del self._last[pool, number]
                self._numbers[pool].discard(number)
        return self._numbers
