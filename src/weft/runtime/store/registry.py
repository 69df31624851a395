"""Who is there: leased keys that live as long as those who put them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass

from weft.domain.errors import NotFound, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import LeaseId, Listing, Put, Store
from weft.runtime.backoff import Backoff
from weft.runtime.store.lease_keepalive import renew_until_lost
from weft.runtime.store.mirror import listings_and_changes
from weft.runtime.tasks import background

DEFAULT_TTL = 10.0


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is there, or says something new."""

    key: StoreKey
    value: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """A member is gone: it said so, or was silent for its time to live."""

    key: StoreKey


async def members(store: Store, prefix: StoreKey) -> AsyncGenerator[Joined | Left, None]:
    """`Joined` for everyone who is there, then each coming and going."""
    known: dict[StoreKey, bytes] = {}
    async with aclosing(listings_and_changes(store, prefix)) as news:
        async for item in news:
            if isinstance(item, Listing):
                now: dict[StoreKey, bytes | None] = dict.fromkeys(known)
                now.update((entry.key, entry.value) for entry in item.entries)
            else:
                now = {event.key: event.value for event in item.events}
            for key, value in now.items():
                if value is None:
                    if known.pop(key, None) is not None:
                        yield Left(key)
                elif known.get(key) != value:
                    known[key] = value
                    yield Joined(key, value)


@asynccontextmanager
async def present(
    store: Store, *, key: StoreKey, value: bytes, ttl: float = DEFAULT_TTL, within: float = 30.0
) -> AsyncIterator[None]:
    """Be there under a key while the block runs, and be gone at once when it ends.

    Begins when the key is in the store; `Unavailable` when that takes longer than `within`. When the lease is lost,
    because the store or we were away, the key is put again as soon as that is possible.
    """
    registered = asyncio.Event()
    async with background(_stay(store, Put(key, value), registered, ttl=ttl), name=f"presence of {key}"):
        try:
            async with asyncio.timeout(within):
                await registered.wait()
        except TimeoutError as error:
            raise Unavailable(f"{key} was not registered within {within} s") from error
        yield


async def _stay(store: Store, put: Put, registered: asyncio.Event, *, ttl: float) -> None:
    backoff = Backoff()
    while True:
        granted = asyncio.get_running_loop().time()
        lease: LeaseId | None = None
        try:
            lease = await store.grant(ttl)
            await store.commit([], [Put(put.key, put.value, lease)])
            registered.set()
            backoff.reset()
            await renew_until_lost(store, lease, ttl=ttl, granted=granted)
        except (Unavailable, NotFound):
            await backoff.pause()
        finally:
            if lease is not None:
                # A store that is away ends the lease by itself when its time is over.
                with suppress(Unavailable):
                    await store.revoke(lease)
