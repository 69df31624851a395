"""Keeping a lease alive from the holder's side."""

from __future__ import annotations

import asyncio

from weft.domain.errors import NotFound, Unavailable
from weft.ports.store import LeaseId, Store
from weft.runtime.backoff import Backoff


async def renew_until_lost(store: Store, lease: LeaseId, *, ttl: float, granted: float) -> str:
    """Renew the lease at least every third of its time; return, with the reason, once it may have ended.

    `granted` is the loop's time before the lease was asked for. Time is counted from before each request was sent, so
    this returns no later than the store ends the lease, however slow the answers are.
    """
    clock = asyncio.get_running_loop().time
    pace = Backoff(first=ttl / 3, cap=ttl / 3)
    trouble = Backoff(first=ttl / 50, cap=ttl / 10)
    while True:
        try:
            async with asyncio.timeout_at(granted + ttl):
                await pace.pause()
                asked = clock()
                while not await _renewed(store, lease):
                    await trouble.pause()
                    asked = clock()
        except TimeoutError:
            return f"the store did not answer for {ttl:g} s"
        except NotFound:
            return "the lease has ended"
        granted = asked
        trouble.reset()


async def _renewed(store: Store, lease: LeaseId) -> bool:
    try:
        await store.keep_alive(lease)
    except Unavailable:
        return False
    return True
