"""Expiry of leases for stores in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from weft.domain.errors import NotFound
from weft.ports.store import LeaseId


class LeaseClock:
    """Calls `on_end(lease)` once for each lease that is not kept alive within its time to live.

    From that moment the lease is unknown: a late `keep_alive` is refused, and cannot race with the deletion of keys.
    """

    def __init__(self, on_end: Callable[[LeaseId], object]) -> None:
        self._on_end = on_end
        # By lease; a lease is alive while it is here.
        self._ttl: dict[LeaseId, float] = {}
        self._timer: dict[LeaseId, asyncio.TimerHandle] = {}

    def __contains__(self, lease: LeaseId) -> bool:
        return lease in self._ttl

    def start(self, lease: LeaseId, ttl: float) -> None:
        """Start the timer of a lease."""
        self._ttl[lease] = ttl
        self._arm(lease)

    def keep_alive(self, lease: LeaseId) -> None:
        """Restart the timer; `NotFound` if the lease has expired."""
        if lease not in self._ttl:
            raise NotFound(f"lease {lease} has expired")
        self._timer[lease].cancel()
        self._arm(lease)

    def forget(self, lease: LeaseId) -> None:
        """Stop the timer of a lease; an expired one is fine."""
        if lease in self._ttl:
            del self._ttl[lease]
            self._timer.pop(lease).cancel()

    def close(self) -> None:
        """Stop all timers."""
        for timer in self._timer.values():
            timer.cancel()
        self._ttl.clear()
        self._timer.clear()

    def _arm(self, lease: LeaseId) -> None:
        self._timer[lease] = asyncio.get_running_loop().call_later(self._ttl[lease], self._expire, lease)

    def _expire(self, lease: LeaseId) -> None:
        # Forget first: `on_end` may take time, and a renewal must fail meanwhile.
        self.forget(lease)
        self._on_end(lease)
