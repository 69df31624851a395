"""Presence of processes: leased keys that exist while their process runs."""

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

# Seconds after which a crashed process counts as gone.
DEFAULT_TTL = 10.0


@dataclass(frozen=True, slots=True)
class Joined:
    """A member is present, or has changed its value."""

    key: StoreKey
    value: bytes


@dataclass(frozen=True, slots=True)
class Left:
    """A member has deregistered, or its lease has expired."""

    key: StoreKey


async def members(store: Store, prefix: StoreKey) -> AsyncGenerator[Joined | Left, None]:
    """`Joined` for every present member, then each change."""
    known: dict[StoreKey, bytes] = {}
    async with aclosing(listings_and_changes(store, prefix)) as items:
        async for item in items:
            if isinstance(item, Listing):
                # A relisting after compaction: members that are not listed have left meanwhile.
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
    """Register under a key while the block runs, and deregister at once when it ends.

    The block starts when the key is in the store; `Unavailable` if that takes longer than `within`. When the lease
    expires, because the store or this process was unreachable, the key is registered again.
    """
    registered = asyncio.Event()
    async with background(_keep_registered(store, Put(key, value), registered, ttl=ttl), name=f"presence of {key}"):
        try:
            async with asyncio.timeout(within):
                await registered.wait()
        except TimeoutError as error:
            raise Unavailable(f"{key} was not registered within {within} s") from error
        yield


async def _keep_registered(store: Store, put: Put, registered: asyncio.Event, *, ttl: float) -> None:
    backoff = Backoff()
    while True:
        # Before the request, so that we never believe in a lease longer than the store.
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
                # If the store is unreachable, the lease expires by itself.
                with suppress(Unavailable):
                    await store.revoke(lease)
