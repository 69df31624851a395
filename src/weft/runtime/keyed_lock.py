"""Turns: one at a time for each key, and nothing is kept for keys that nobody asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

K = TypeVar("K", bound=Hashable)


class KeyedLock(Generic[K]):
    """A lock for each key: `async with turns[key]`. Who comes first has the first turn.

    A lock lives for as long as someone holds it or waits for it, so keys that come once, such as containers, cost
    nothing afterwards.
    """

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[K, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, key: K) -> asyncio.Lock:
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def __len__(self) -> int:
        """How many keys someone is busy with."""
        return len(self._locks)
