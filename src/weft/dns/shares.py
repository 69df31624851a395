"""Shares of a limited resource: one client cannot take what the others of its tenant need, nor one tenant that of all.

A client gets what it asks for up to its own limit, while there is room. When the room is used up, each client still
gets its reserve, so that a client that floods meets a limit, and one that asks now and then meets none.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Limits(NamedTuple):
    """How much there is for all, for one client, for one client when all is used up, and at most with reserves."""

    room: int
    client: int
    reserve: int
    most: int


class Shares:
    """What clients hold at present. `parent` limits all clients of this object together, as one client of its own."""

    def __init__(self, limits: Limits, *, parent: Shares | None = None, name: str = "") -> None:
        self._limits = limits
        self._parent = parent
        self._name = name
        # Only clients that hold something are in it, so that it is bounded by `most`.
        self._held: Counter[str] = Counter()
        self._total = 0

    def take(self, client: str) -> bool:
        """Take one share; False when the client has to do without."""
        limits, held = self._limits, self._held.get(client, 0)
        # A reserve is for those who hold less than it; a flood by many clients ends at `most`.
        allowed = limits.client if self._total < limits.room else min(limits.reserve, limits.client)
        if held >= allowed or self._total >= limits.most:
            return False
        if self._parent and not self._parent.take(self._name):
            return False
        self._held[client] += 1
        self._total += 1
        return True

    def give_back(self, client: str) -> None:
        """Give back one share that `take` has granted."""
        self._held[client] -= 1
        self._total -= 1
        if not self._held[client]:
            del self._held[client]
        if self._parent:
            self._parent.give_back(self._name)
