"""Keeps copies of a part of the store up to date: list, then watch from the listed revision, until cancelled."""

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


class Subscriber(Protocol):
    """Receives listings and changes. Called from the event loop, in the order of revisions per key; must not raise."""

    def replace(self, listing: Listing) -> None:
        """All entries there are; a key that is not listed is deleted."""
        ...

    def apply(self, change: Change) -> None:
        """The events of one revision."""
        ...


class Source(Protocol):
    """What is needed of a store to follow it."""

    async def list(self, prefix: StoreKey) -> Listing: ...

    def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]: ...


async def listings_and_changes(store: Source, prefix: StoreKey) -> AsyncGenerator[Listing | Change, None]:
    """A listing, then each later change; a new listing when history was compacted. Never ends: faults are retried."""
    backoff = Backoff()
    revision: Revision | None = None
    while True:
        try:
            # The first time, and after history was compacted.
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
        # The store has dropped the history after our revision: only a new listing closes the gap.
        except Compacted:
            revision = None
        except Unavailable:
            await backoff.pause()


class _OwnWrite(NamedTuple):
    """A write of our own to a key, until the watch has reached its revision."""

    revision: Revision
    value: bytes | None


class Mirror:
    """Feeds subscribers with a part of the store, one after the other in their order. `run` does the work.

    `revision` is how far the watch has come: the subscribers have received everything up to it. The owner of the
    mirror may add commits of its own at once by `note_own`; the watch then neither repeats them nor reverts them with
    older events.
    """

    def __init__(self, store: Source, *subscribers: Subscriber, prefix: StoreKey = EVERYTHING) -> None:
        self._store = store
        self._subscribers = subscribers
        self._prefix = prefix
        # Own writes that the watch has not reached: they hide older events of the same key.
        self._own: dict[StoreKey, _OwnWrite] = {}
        self._newest_own: Revision = NEVER
        # A heap by revision; the counter keeps heapq from comparing futures of the same revision.
        self._waiters: list[tuple[Revision, int, asyncio.Future[None]]] = []
        self._order = count()
        self.revision: Revision = NEVER

    @property
    def in_sync(self) -> bool:
        """Whether the subscribers have received a full listing."""
        return self.revision != NEVER

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with aclosing(listings_and_changes(self._store, self._prefix)) as items:
            async for item in items:
                if isinstance(item, Listing):
                    self._take_listing(item)
                else:
                    self._take_change(item)

    async def wait_for(self, revision: Revision, *, within: float) -> None:
        """Return when the subscribers have everything up to the revision; `Unavailable` when that takes longer.

        For revisions of changes under the prefix: others need not reach the mirror.
        """
        # NEVER waits for the first listing.
        if self.revision >= revision and self.in_sync:
            return
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A heap: each change wakes the waiters up to its revision, without a look at the others.
        heapq.heappush(self._waiters, (revision, next(self._order), reached))
        try:
            async with asyncio.timeout(within):
                await reached
        except TimeoutError as error:
            raise Unavailable(f"the store watch has not reached revision {revision} within {within} s") from error

    def note_own(self, revision: Revision, events: Iterable[Event]) -> None:
        """Hand the events of our own commit to the subscribers now, before the watch delivers them."""
        if revision <= self.revision or not self.in_sync:
            return  # the watch has delivered it already, or the listing will
        fresh = []
        for event in events:
            own = self._own.get(event.key)
            if own is None or own.revision < revision:
                self._own[event.key] = _OwnWrite(revision, event.value)
                fresh.append(event)
        self._newest_own = max(self._newest_own, revision)
        if fresh:
            self._publish(Change(revision, tuple(fresh)))

    def _take_listing(self, listing: Listing) -> None:
        if listing.revision < self.revision:
            self._own.clear()  # the store was restored from a backup: what we wrote since is gone
        self._own = {key: own for key, own in self._own.items() if own.revision > listing.revision}
        if self._own:
            entries = {entry.key: entry for entry in listing.entries}
            for key, own in self._own.items():
                if own.value is None:
                    entries.pop(key, None)
                else:
                    entries[key] = Entry(key, own.value, own.revision)
            listing = Listing(tuple(entries[key] for key in sorted(entries)), listing.revision)
        for subscriber in self._subscribers:
            subscriber.replace(listing)
        self._advance(listing.revision)

    def _take_change(self, change: Change) -> None:
        if not self._own:
            self._publish(change)
        else:
            events = tuple(event for event in change.events if self._is_newer(event.key, change.revision))
            if events:
                self._publish(Change(change.revision, events))
            if change.revision >= self._newest_own:
                self._own.clear()
        self._advance(change.revision)

    def _is_newer(self, key: StoreKey, revision: Revision) -> bool:
        own = self._own.get(key)
        if own is None:
            return True
        if own.revision <= revision:
            del self._own[key]  # the watch has reached our write: older events of the key cannot follow
        return own.revision < revision

    def _publish(self, change: Change) -> None:
        for subscriber in self._subscribers:
            subscriber.apply(change)

    def _advance(self, revision: Revision) -> None:
        self.revision = revision
        while self._waiters and self._waiters[0][0] <= revision:
            _, _, reached = heapq.heappop(self._waiters)
            if not reached.done():
                reached.set_result(None)


@asynccontextmanager
async def follow(
    store: Source, *subscribers: Subscriber, prefix: StoreKey = EVERYTHING, within: float = 30.0
) -> AsyncIterator[Mirror]:
    """A mirror that is in sync and stays so while the block runs; `Unavailable` when the first listing takes longer."""
    mirror = Mirror(store, *subscribers, prefix=prefix)
    async with background(mirror.run(), name=f"mirror of {prefix or 'the store'}"):
        await mirror.wait_for(NEVER, within=within)
        yield mirror
