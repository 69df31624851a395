"""Leader election over any store: the holder of the leader key leads while it keeps its lease alive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

from weft.domain.errors import NotFound, Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import NEVER, LeaseId, Listing, Put, Revision, RevisionEquals, Store
from weft.runtime.backoff import Backoff
from weft.runtime.store.lease_keepalive import boottime, renew_until_lost
from weft.runtime.store.mirror import listings_and_changes
from weft.runtime.tasks import background

# Seconds without a leader after a crash; a shorter lease would expire in a slow election of etcd.
DEFAULT_TTL = 10.0


class Leadership:
    """Held from its creation until `lost` is set; once lost it is never regained.

    `lost` is set before the store can give the key to another candidate. A commit may be in flight at that moment, so
    commits of the leader compare the `fence`, which holds for this leadership only.
    """

    def __init__(self, key: StoreKey, revision: Revision, *, certain_until: float) -> None:
        self.fence = RevisionEquals(key, revision)
        # By `boottime`: timers of the event loop stop in suspend, while the store's go on.
        self.certain_until = certain_until
        self.lost = asyncio.Event()
        self.reason = ""

    @property
    def held(self) -> bool:
        return not self.lost.is_set() and boottime() < self.certain_until

    def lose(self, reason: str) -> None:
        """Report the loss; the first reason stays."""
        self.reason = self.reason or reason
        self.lost.set()


async def holders(store: Store, key: StoreKey) -> AsyncGenerator[bytes | None, None]:
    """The holder of the key, now and after each change; None while there is none."""
    async with aclosing(listings_and_changes(store, key)) as items:
        async for item in items:
            if isinstance(item, Listing):
                yield next((entry.value for entry in item.entries if entry.key == key), None)
            else:
                for event in item.events:
                    if event.key == key:
                        yield event.value


@asynccontextmanager
async def lead(
    store: Store,
    *,
    key: StoreKey,
    name: bytes,
    ttl: float = DEFAULT_TTL,
    within: float | None = None,
    replace_own: bool = True,
) -> AsyncIterator[Leadership]:
    """Wait until the key is ours, hold it while the block runs, and release it at once when the block ends.

    The key's value is `name`, which must be unique to the candidate: a holder of the same name is our own previous
    process, and is replaced without waiting for its lease. That is so at the first election of a process only
    (`replace_own`): later, such a holder is another process of the same name, and the two would depose each other
    without end (M6). `Unavailable` if it takes longer than `within`.
    """
    try:
        async with asyncio.timeout(within):
            lease, revision, granted, certain_until = await _campaign(
                store, key=key, name=name, ttl=ttl, replace_own=replace_own
            )
    except TimeoutError as error:
        raise Unavailable(f"{key} could not be acquired within {within} s") from error
    # The revision of the put is unique to this leadership, which makes it a fence.
    leadership = Leadership(key, revision, certain_until=certain_until)

    def renewed(until: float) -> None:
        leadership.certain_until = until

    async def watch_lease() -> None:
        leadership.lose(await renew_until_lost(store, lease, ttl=ttl, granted=granted, renewed=renewed))

    try:
        async with (
            background(watch_lease(), name=f"lease of {key}"),
            # Besides the lease: an operator may delete the key.
            background(_watch_holder(store, leadership), name=f"holder of {key}"),
        ):
            yield leadership
    finally:
        leadership.lose("released")
        await _revoke(store, lease)


async def _campaign(
    store: Store, *, key: StoreKey, name: bytes, ttl: float, replace_own: bool
) -> tuple[LeaseId, Revision, float, float]:
    """Acquire the key when it is free: the lease, the key's revision, the time before the lease was granted, and the
    `boottime` until which it is certain."""
    backoff = Backoff()
    while True:
        try:
            replaced = await _wait_until_free(store, key, name if replace_own else None)
            granted, certain_until = asyncio.get_running_loop().time(), boottime() + ttl
            lease = await store.grant(ttl)
            try:
                revision = await store.commit([RevisionEquals(key, replaced)], [Put(key, name, lease)])
                return lease, revision, granted, certain_until
            except BaseException:
                # The commit may have succeeded although its response was lost: revoking the lease deletes the key.
                await _revoke(store, lease)
                raise
        except Stale:
            continue  # another candidate was faster
        except (Unavailable, NotFound):
            await backoff.pause()


async def _wait_until_free(store: Store, key: StoreKey, own: bytes | None) -> Revision:
    """Wait until the key is free: `NEVER`, or the revision at which our previous process, called `own`, acquired it."""
    async with aclosing(listings_and_changes(store, key)) as items:
        async for item in items:
            if isinstance(item, Listing):
                held = next((entry for entry in item.entries if entry.key == key), None)
                if held is None:
                    return NEVER
                if held.value == own:
                    return held.revision
            elif any(event.key == key and event.value is None for event in item.events):
                return NEVER
    raise AssertionError("the watch never ends")


async def _watch_holder(store: Store, leadership: Leadership) -> None:
    """Report the loss when the key is no longer as we put it."""
    fence = leadership.fence
    async with aclosing(listings_and_changes(store, fence.key)) as items:
        async for item in items:
            if isinstance(item, Listing):
                gone = not any(entry.key == fence.key and entry.revision == fence.revision for entry in item.entries)
            else:
                gone = any(event.key == fence.key for event in item.events)
            if gone:
                leadership.lose(f"{fence.key} was deleted or taken over")
                return


async def _revoke(store: Store, lease: LeaseId) -> None:
    # If the store is unreachable, the lease expires by itself.
    with suppress(Unavailable):
        await store.revoke(lease)
