"""A lock per key, without memory for keys that are not in use."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

K = TypeVar("K", bound=Hashable)


class KeyedLock(Generic[K]):
    """A lock for each key: `async with locks[key]`. Waiters are served in order.

    A lock exists only while a task holds it or waits for it, so that short-lived keys, such as container ids, do not
    accumulate.
    """

    def __init__(self) -> None:
        # Weak: holders and waiters keep the only strong references.
        self._locks: WeakValueDictionary[K, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, key: K) -> asyncio.Lock:
        # A local reference, so that the lock is not collected between creation and use.
        lock = self._locks.get(key)
        if lock is None:
            lock = self._locks[key] = asyncio.Lock()
        return lock

    def __len__(self) -> int:
        """The number of keys that are locked or waited for."""
        return len(self._locks)
