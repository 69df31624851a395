"""Released addresses rest a while: a peer that still remembers the old holder must not meet a new one there."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Mapping

from weft.domain.addresses import Address
from weft.domain.ids import NetworkKey

REST_S = 60.0

Pool = tuple[NetworkKey, int]


class Resting:
    """What was released lately, by network and family. Lost with the process: resting is a courtesy, not a promise."""

    def __init__(self, *, rest: float = REST_S) -> None:
        self._rest = rest
        self._order: deque[tuple[float, Pool, int]] = deque()
        self._until: defaultdict[Pool, dict[int, float]] = defaultdict(dict)

    def rest(self, network: NetworkKey, address: Address, *, now: float) -> None:
        """The address was released at `now`."""
        pool = (network, address.family)
        self._until[pool][address.number] = now + self._rest
        self._order.append((now + self._rest, pool, address.number))

    def at(self, now: float) -> Mapping[Pool, Container[int]]:
        """The addresses that rest at `now`."""
        while self._order and self._order[0][0] <= now:
            until, pool, number = self._order.popleft()
            if self._until[pool].get(number) == until:
                del self._until[pool][number]
        return self._until
