"""The recent changes of a store that lives in this process, and those who wait for the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from itertools import islice

from weft.domain.errors import Compacted, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Revision


def narrowed(change: Change, prefix: StoreKey) -> Change | None:
    """The part of a change that lies under the prefix, or None when nothing does."""
    events = tuple(event for event in change.events if event.key.startswith(prefix))
    if not events:
        return None
    return change if len(events) == len(change.events) else Change(change.revision, events)


async def nothing_older(since: Revision) -> Sequence[Change]:
    """For stores that keep no history but the feed itself."""
    raise Compacted(f"the history after revision {since} is gone")


class Feed:
    """The last `keep` changes, one for each revision without a gap, shared by all watchers.

    Nothing is queued per watcher: each remembers how far it has read, so a slow one costs nothing. Whoever is further
    behind is served by `older`, which gives some of the changes that follow a revision, or raises `Compacted`. Used
    from one event loop only.
    """

    def __init__(
        self,
        *,
        revision: Revision,
        keep: int,
        older: Callable[[Revision], Awaitable[Sequence[Change]]] = nothing_older,
    ) -> None:
        self.revision = revision
        self._recent: deque[Change] = deque(maxlen=keep)
        self._older = older
        self._moved = asyncio.Event()
        self._closed = False

    def publish(self, changes: Iterable[Change]) -> None:
        """Add the next revisions and wake everyone who waits for them."""
        for change in changes:
            self.revision = change.revision
            self._recent.append(change)
        self._wake()

    def close(self) -> None:
        """End every watch with `Unavailable`."""
        self._closed = True
        self._wake()

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        """Every change after `since` under the prefix, for ever."""
        while True:
            for change in await self._after(since):
                since = change.revision
                mine = narrowed(change, prefix) if prefix else change
                if mine is not None:
                    yield mine

    async def _after(self, since: Revision) -> Sequence[Change]:
        """Some of the changes after a revision, at least one."""
        while self.revision == since:
            if self._closed:
                raise Unavailable("the store was closed")
            await self._moved.wait()
        behind = self.revision - since
        if behind < 0:
            # The store was set back to an earlier copy: whoever knows later revisions must look at all of it again.
            raise Compacted(f"the store is at revision {self.revision}, {since} was asked for")
        if behind > len(self._recent):
            return await self._older(since)
        return list(islice(reversed(self._recent), behind))[::-1]

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()
