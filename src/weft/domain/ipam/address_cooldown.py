"""Released addresses rest a while: a peer that still remembers the old holder must not meet a new one there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping

from weft.domain.addresses import Address
from weft.domain.ids import NetworkKey
from weft.domain.ipam.allocator import NumberSet

REST_S = 60.0

Pool = tuple[NetworkKey, int]


class Cooldown:
    """What was released lately, by network and family. Lost with the process: resting is a courtesy, not a promise."""

    def __init__(self, *, rest: float = REST_S) -> None:
        self._rest = rest
        self._order: deque[tuple[float, Pool, int]] = deque()
        self._last: dict[tuple[Pool, int], float] = {}
        self._numbers: defaultdict[Pool, NumberSet] = defaultdict(NumberSet)

    def rest(self, network: NetworkKey, address: Address, *, now: float) -> None:
        """The address was released at `now`."""
        pool, until = (network, address.family), now + self._rest
        self._numbers[pool].add(address.number)
        self._last[pool, address.number] = until
        self._order.append((until, pool, address.number))

    def at(self, now: float) -> Mapping[Pool, NumberSet]:
        """The addresses that rest at `now`."""
        while self._order and self._order[0][0] <= now:
            until, pool, number = self._order.popleft()
            if self._last.get((pool, number)) == until:  # not released once more since
                del self._last[pool, number]
                self._numbers[pool].discard(number)
        return self._numbers
