"""Keep a lease alive on the side of its holder."""

from __future__ import annotations

import asyncio

from weft.domain.errors import NotFound, Unavailable
from weft.ports.store import LeaseId, Store
from weft.runtime.backoff import Backoff


async def renew_until_lost(store: Store, lease: LeaseId, *, ttl: float, granted: float) -> str:
    """Renew the lease every third of its TTL; returns the reason once the lease may have expired.

    `granted` is the loop's time before the lease was requested. Time counts from before each request was sent, so that
    this returns before the store expires the lease, however slow the responses are.
    """
    clock = asyncio.get_running_loop().time
    pace = Backoff(first=ttl / 3, cap=ttl / 3)
    # Renewals that fail are retried much faster, to use what is left of the TTL.
    retry = Backoff(first=ttl / 50, cap=ttl / 10)
    while True:
        try:
            # One deadline for the pause and all retries: after it the store may have expired the lease.
            async with asyncio.timeout_at(granted + ttl):
                await pace.pause()
                sent = clock()
                while not await _renewed(store, lease):
                    await retry.pause()
                    sent = clock()
        except TimeoutError:
            return f"the store did not respond for {ttl:g} s"
        except NotFound:
            return "the lease has expired"
        granted = sent
        retry.reset()


async def _renewed(store: Store, lease: LeaseId) -> bool:
    try:
        await store.keep_alive(lease)
    except Unavailable:
        return False
    return True
