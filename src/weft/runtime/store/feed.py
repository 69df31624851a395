"""Recent changes of a store in this process, and the watchers that wait for the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from itertools import islice

from weft.domain.errors import Compacted, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Revision

# Bytes of values that a feed keeps in memory.
RECENT_BYTES = 16 << 20


def _size(change: Change) -> int:
    return sum(len(event.key) + len(event.value or b"") for event in change.events)


def filter_change(change: Change, prefix: StoreKey) -> Change | None:
    """The events of a change under the prefix; None if there are none."""
    events = tuple(event for event in change.events if event.key.startswith(prefix))
    if not events:
        return None
    return change if len(events) == len(change.events) else Change(change.revision, events)


async def no_older_changes(since: Revision) -> Sequence[Change]:
    """For stores whose only history is the feed."""
    raise Compacted(f"revision {since} compacted")


class Feed:
    """The last `keep` changes, one per revision without gaps, shared by all watchers.

    There is no queue per watcher: each has a position in the feed, so that a slow one costs no memory. One that is
    further behind reads from `older`, which returns some changes after a revision, or raises `Compacted`. For use from
    one event loop only.
    """

    def __init__(
        self,
        *,
        revision: Revision,
        keep: int,
        keep_bytes: int = RECENT_BYTES,
        older: Callable[[Revision], Awaitable[Sequence[Change]]] = no_older_changes,
    ) -> None:
        self.revision = revision
        # A ring buffer of consecutive revisions: a revision's position follows from its number.
        self._recent: deque[Change] = deque(maxlen=keep)
        # Bytes of the changes in it. Large values push out old changes, which watchers then read from `older` (M3).
        self._keep_bytes = keep_bytes
        self.bytes = 0
        self._older = older
        self._moved = asyncio.Event()
        self._closed = False

    def publish(self, changes: Iterable[Change]) -> None:
        """Append the next revisions and wake all watchers."""
        for change in changes:
            self.revision = change.revision
            if len(self._recent) == self._recent.maxlen:
                self.bytes -= _size(self._recent[0])
            self._recent.append(change)
            self.bytes += _size(change)
            # The newest stays: its watchers are waiting for it.
            while self.bytes > self._keep_bytes and len(self._recent) > 1:
                self.bytes -= _size(self._recent.popleft())
        self._wake()

    def close(self) -> None:
        """End every watch with `Unavailable`."""
        self._closed = True
        self._wake()

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        """Every change after `since` under the prefix, without end."""
        while True:
            for change in await self._after(since):
                since = change.revision
                matching = filter_change(change, prefix) if prefix else change
                if matching is not None:
                    yield matching

    async def _after(self, since: Revision) -> Sequence[Change]:
        """Some changes after a revision, at least one."""
        while self.revision == since:
            if self._closed:
                raise Unavailable("the store was closed")
            await self._moved.wait()
        behind = self.revision - since
        if behind < 0:
            # The store was restored from an older copy: a watcher with a later revision must list again.
            raise Compacted(f"the store is at revision {self.revision}, the watch starts at {since}")
        if behind > len(self._recent):
            return await self._older(since)
        # From the right end, because watchers are usually only a few revisions behind.
        return list(islice(reversed(self._recent), behind))[::-1]

    def _wake(self) -> None:
        # A fresh event for the next change; the old one wakes everyone who holds a reference to it.
        self._moved.set()
        self._moved = asyncio.Event()
