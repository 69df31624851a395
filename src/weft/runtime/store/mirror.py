"""A copy of a part of the store, kept up to date: list, then watch from the listed revision, for ever."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from itertools import count
from typing import NamedTuple, Protocol

from weft.domain.errors import Compacted, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import NEVER, Change, Entry, Event, Listing, Revision
from weft.runtime.backoff import Backoff
from weft.runtime.tasks import background

# The prefix of all keys.
EVERYTHING = StoreKey("")


class Sink(Protocol):
    """Whoever keeps the copy. Called from the event loop, in the order of revisions for each key; must not raise."""

    def replace(self, listing: Listing) -> None:
        """Everything there is; what is not listed is gone."""
        ...

    def apply(self, change: Change) -> None:
        """What one revision changed."""
        ...


class Source(Protocol):
    """What is needed of a store to follow it."""

    async def list(self, prefix: StoreKey) -> Listing: ...

    def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]: ...


async def listings_and_changes(store: Source, prefix: StoreKey) -> AsyncGenerator[Listing | Change, None]:
    """A listing, then each later change; a new listing whenever history was lost. Waits out a store that is away."""
    backoff = Backoff()
    revision: Revision | None = None
    while True:
        try:
            if revision is None:
                listing = await store.list(prefix)
                revision = listing.revision
                backoff.reset()
                yield listing
            async with aclosing(store.watch(prefix, revision)) as changes:
                async for change in changes:
                    revision = change.revision
                    backoff.reset()
                    yield change
        except Compacted:
            revision = None
        except Unavailable:
            await backoff.pause()


class _Own(NamedTuple):
    """What we wrote to a key ourselves, until the watch has come that far."""

    revision: Revision
    value: bytes | None


class Mirror:
    """Feeds a sink with a part of the store. `run` does the work, for as long as the mirror shall live.

    `revision` is how far the watch has come: everything up to it is in the sink. What the mirror's owner committed
    itself it may add at once by `note_own`; the watch then neither repeats it nor takes it back with older news.
    """

    def __init__(self, store: Source, sink: Sink, *, prefix: StoreKey = EVERYTHING) -> None:
        self._store = store
        self._sink = sink
        self._prefix = prefix
        self._own: dict[StoreKey, _Own] = {}
        self._newest_own: Revision = NEVER
        self._waiters: list[tuple[Revision, int, asyncio.Future[None]]] = []
        self._order = count()
        self.revision: Revision = NEVER

    @property
    def in_sync(self) -> bool:
        """Whether the sink has had a full listing."""
        return self.revision != NEVER

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with aclosing(listings_and_changes(self._store, self._prefix)) as news:
            async for item in news:
                if isinstance(item, Listing):
                    self._take_listing(item)
                else:
                    self._take_change(item)

    async def wait_for(self, revision: Revision, *, within: float) -> None:
        """Return when everything up to the revision is in the sink; `Unavailable` when that takes longer.

        For revisions of changes under the prefix: others need not reach the mirror.
        """
        if self.revision >= revision and self.in_sync:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (revision, next(self._order), reached))
        try:
            async with asyncio.timeout(within):
                await reached
        except TimeoutError as error:
            raise Unavailable(f"the store's news up to revision {revision} did not come within {within} s") from error

    def note_own(self, revision: Revision, events: Iterable[Event]) -> None:
        """Hand the events of our own commit to the sink now, before the watch brings them."""
        if revision <= self.revision or not self.in_sync:
            return  # the watch has brought it already, or the listing will
        fresh = []
        for event in events:
            own = self._own.get(event.key)
            if own is None or own.revision < revision:
                self._own[event.key] = _Own(revision, event.value)
                fresh.append(event)
        self._newest_own = max(self._newest_own, revision)
        if fresh:
            self._sink.apply(Change(revision, tuple(fresh)))

    def _take_listing(self, listing: Listing) -> None:
        if listing.revision < self.revision:
            self._own.clear()  # the store was set back to an earlier copy: what we wrote since is gone
        self._own = {key: own for key, own in self._own.items() if own.revision > listing.revision}
        if self._own:
            entries = {entry.key: entry for entry in listing.entries}
            for key, own in self._own.items():
                if own.value is None:
                    entries.pop(key, None)
                else:
                    entries[key] = Entry(key, own.value, own.revision)
            listing = Listing(tuple(entries[key] for key in sorted(entries)), listing.revision)
        self._sink.replace(listing)
        self._advance(listing.revision)

    def _take_change(self, change: Change) -> None:
        if not self._own:
            self._sink.apply(change)
        else:
            events = tuple(event for event in change.events if self._is_news(event.key, change.revision))
            if events:
                self._sink.apply(Change(change.revision, events))
            if change.revision >= self._newest_own:
                self._own.clear()
        self._advance(change.revision)

    def _is_news(self, key: StoreKey, revision: Revision) -> bool:
        own = self._own.get(key)
        if own is None:
            return True
        if own.revision <= revision:
            del self._own[key]  # the watch has come this far with the key: it needs no more protection
        return own.revision < revision

    def _advance(self, revision: Revision) -> None:
        self.revision = revision
        while self._waiters and self._waiters[0][0] <= revision:
            _, _, reached = heapq.heappop(self._waiters)
            if not reached.done():
                reached.set_result(None)


@asynccontextmanager
async def follow(
    store: Source, sink: Sink, *, prefix: StoreKey = EVERYTHING, within: float = 30.0
) -> AsyncIterator[Mirror]:
    """A mirror that is in sync and stays so while the block runs; `Unavailable` when the first listing takes longer."""
    mirror = Mirror(store, sink, prefix=prefix)
    async with background(mirror.run(), name=f"mirror of {prefix or 'the store'}"):
        await mirror.wait_for(NEVER, within=within)
        yield mirror
