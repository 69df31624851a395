"""Leadership over any store: who holds the leader's key leads, for as long as its lease is kept alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

from weft.domain.errors import NotFound, Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import NEVER, LeaseId, Listing, Put, Revision, RevisionEquals, Store
from weft.runtime.backoff import Backoff
from weft.runtime.store.lease_keepalive import renew_until_lost
from weft.runtime.store.mirror import listings_and_changes
from weft.runtime.tasks import background

DEFAULT_TTL = 10.0


class Leadership:
    """Held from the moment it is given until `lost` is set; once lost it never comes back.

    `lost` is set no later than the store may give the key to someone else. A commit can be under way at that moment, so
    those that only the leader may make carry the `fence`, which holds for this leadership and no other.
    """

    def __init__(self, key: StoreKey, revision: Revision) -> None:
        self.fence = RevisionEquals(key, revision)
        self.lost = asyncio.Event()
        self.reason = ""

    @property
    def held(self) -> bool:
        return not self.lost.is_set()

    def lose(self, reason: str) -> None:
        """Report the loss; the first reason stays."""
        self.reason = self.reason or reason
        self.lost.set()


async def holders(store: Store, key: StoreKey) -> AsyncGenerator[bytes | None, None]:
    """The name of who holds the key now, and again after each change; None while nobody does."""
    async with aclosing(listings_and_changes(store, key)) as news:
        async for item in news:
            if isinstance(item, Listing):
                yield next((entry.value for entry in item.entries if entry.key == key), None)
            else:
                for event in item.events:
                    if event.key == key:
                        yield event.value


@asynccontextmanager
async def lead(
    store: Store, *, key: StoreKey, name: bytes, ttl: float = DEFAULT_TTL, within: float | None = None
) -> AsyncIterator[Leadership]:
    """Wait until the key is ours, hold it while the block runs, and hand it over at once when the block ends.

    The key's value is `name`, which must be the candidate's own: a holder of the same name is taken for our earlier
    life and replaced without waiting for its lease to end. `Unavailable` when it takes longer than `within`.
    """
    try:
        async with asyncio.timeout(within):
            lease, revision, granted = await _campaign(store, key=key, name=name, ttl=ttl)
    except TimeoutError as error:
        raise Unavailable(f"{key} did not become ours within {within} s") from error
    leadership = Leadership(key, revision)

    async def notice_end() -> None:
        leadership.lose(await renew_until_lost(store, lease, ttl=ttl, granted=granted))

    try:
        async with (
            background(notice_end(), name=f"lease of {key}"),
            background(_notice_successor(store, leadership), name=f"holder of {key}"),
        ):
            yield leadership
    finally:
        leadership.lose("given up")
        await _give_back(store, lease)


async def _campaign(store: Store, *, key: StoreKey, name: bytes, ttl: float) -> tuple[LeaseId, Revision, float]:
    """Take the key as soon as nobody holds it: the lease, the key's revision, and the time before the lease began."""
    backoff = Backoff()
    while True:
        try:
            replaced = await _until_free(store, key, name)
            granted = asyncio.get_running_loop().time()
            lease = await store.grant(ttl)
            try:
                return lease, await store.commit([RevisionEquals(key, replaced)], [Put(key, name, lease)]), granted
            except BaseException:
                # We may have got it without hearing so: without the lease the key goes, and we start afresh.
                await _give_back(store, lease)
                raise
        except Stale:
            continue  # another was quicker
        except (Unavailable, NotFound):
            await backoff.pause()


async def _until_free(store: Store, key: StoreKey, name: bytes) -> Revision:
    """Wait until nobody else holds the key: `NEVER`, or the revision at which our own earlier life took it."""
    async with aclosing(listings_and_changes(store, key)) as news:
        async for item in news:
            if isinstance(item, Listing):
                held = next((entry for entry in item.entries if entry.key == key), None)
                if held is None:
                    return NEVER
                if held.value == name:
                    return held.revision
            elif any(event.key == key and event.value is None for event in item.events):
                return NEVER
    raise AssertionError("listings and changes go on for ever")


async def _notice_successor(store: Store, leadership: Leadership) -> None:
    """Report the loss when the key is no longer as we put it."""
    fence = leadership.fence
    async with aclosing(listings_and_changes(store, fence.key)) as news:
        async for item in news:
            if isinstance(item, Listing):
                gone = not any(entry.key == fence.key and entry.revision == fence.revision for entry in item.entries)
            else:
                gone = any(event.key == fence.key for event in item.events)
            if gone:
                leadership.lose(f"{fence.key} was taken away")
                return


async def _give_back(store: Store, lease: LeaseId) -> None:
    # A store that is away ends the lease by itself when its time is over.
    with suppress(Unavailable):
        await store.revoke(lease)
