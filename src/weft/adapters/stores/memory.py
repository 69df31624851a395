"""Store in this process's memory: for tests, and the simplest implementation of the contract."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import NamedTuple, Self

from weft.domain.errors import NotFound, Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import (
    NEVER,
    Change,
    Compare,
    Delete,
    DeleteAll,
    Entry,
    Event,
    LeaseId,
    Listing,
    Put,
    Revision,
    RevisionEquals,
    Write,
)
from weft.runtime.store.feed import Feed
from weft.runtime.store.group_commit import check_writes
from weft.runtime.store.leases import LeaseClock

DEFAULT_HISTORY = 10_000
# 0 is NEVER.
_FIRST_REVISION = 1


class _Value(NamedTuple):
    value: bytes
    revision: Revision
    lease: LeaseId | None


class MemoryStore:
    """See `ports.store`. It is not persistent: a new one is empty."""

    def __init__(self, *, history: int = DEFAULT_HISTORY) -> None:
        self._values: dict[StoreKey, _Value] = {}
        self._feed = Feed(revision=_FIRST_REVISION, keep=history)
        self._leases = LeaseClock(self._end_lease)
        self._lease_ids = itertools.count(1)
        self._open = False

    async def read(self, key: StoreKey) -> Entry | None:
        self._check_open()
        stored = self._values.get(key)
        return None if stored is None else Entry(key, stored.value, stored.revision)

    async def list(self, prefix: StoreKey) -> Listing:
        self._check_open()
        found = sorted(item for item in self._values.items() if item[0].startswith(prefix))
        return Listing(tuple(Entry(key, held.value, held.revision) for key, held in found), self._feed.revision)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        self._check_open()
        check_writes(writes)
        # All checks precede all writes, and nothing awaits in between: that makes the commit atomic.
        for compare in compares:
            self._check(compare)
        for write in writes:
            if isinstance(write, Put) and write.lease is not None and write.lease not in self._leases:
                raise NotFound(f"lease {write.lease} has expired")
        return self._write(writes)

    def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        self._check_open()
        return self._feed.watch(prefix, since)

    async def grant(self, ttl: float) -> LeaseId:
        self._check_open()
        lease = LeaseId(next(self._lease_ids))
        self._leases.start(lease, ttl)
        return lease

    async def keep_alive(self, lease: LeaseId) -> None:
        self._check_open()
        self._leases.keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        self._check_open()
        # Before the deletion of its keys: a put with this lease must fail from now on.
        self._leases.forget(lease)
        self._end_lease(lease)

    async def __aenter__(self) -> Self:
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._leases.close()
        self._feed.close()

    # The contract: calls on a closed store fail with `Unavailable`.
    def _check_open(self) -> None:
        if not self._open:
            raise Unavailable("the store is not open")

    def _check(self, compare: Compare) -> None:
        if isinstance(compare, RevisionEquals):
            stored = self._values.get(compare.key)
            found = NEVER if stored is None else stored.revision
            if found != compare.revision:
                raise Stale(f"{compare.key} is at revision {found}, not {compare.revision}")
            return
        for key, held in self._values.items():
            if held.revision > compare.since and key.startswith(compare.prefix):
                raise Stale(f"{key} was put at revision {held.revision}, after {compare.since}")

    def _write(self, writes: Sequence[Write]) -> Revision:
        revision = self._feed.revision + 1
        events: deque[Event] = deque()
        for write in writes:
            match write:
                case Put():
                    self._values[write.key] = _Value(write.value, revision, write.lease)
                    events.append(Event(write.key, write.value))
                case Delete():
                    if self._values.pop(write.key, None) is not None:
                        events.append(Event(write.key, None))
                case DeleteAll():
                    for key in sorted(key for key in self._values if key.startswith(write.prefix)):
                        del self._values[key]
                        events.append(Event(key, None))
        # A commit that changes nothing gets no revision of its own.
        if events:
            self._feed.publish([Change(revision, tuple(events))])
        return self._feed.revision

    def _end_lease(self, lease: LeaseId) -> None:
        self._write([Delete(key) for key, held in self._values.items() if held.lease == lease])


def open_store(*, history: int = DEFAULT_HISTORY) -> MemoryStore:
    """An empty store that keeps the last `history` revisions for watchers."""
    return MemoryStore(history=history)
