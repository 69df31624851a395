"""Keep a lease alive on the side of its holder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from weft.domain.errors import NotFound, Unavailable
from weft.ports.store import LeaseId, Store
from weft.runtime.backoff import Backoff

# Seconds since the machine booted, suspend included: a lease expires while its holder sleeps. The event loop's clock,
# CLOCK_MONOTONIC, stops in suspend.
boottime: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


async def renew_until_lost(
    store: Store, lease: LeaseId, *, ttl: float, granted: float, renewed: Callable[[float], None] = lambda _: None
) -> str:
    """Renew the lease every third of its TTL; returns the reason once the lease may have expired.

    `renewed` is called with the `boottime` until which the lease is certain.

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
                sent, booted = clock(), boottime()
                while not await _renewed(store, lease):
                    await retry.pause()
                    sent, booted = clock(), boottime()
        except TimeoutError:
            return f"the store did not respond for {ttl:g} s"
        except NotFound:
            return "the lease has expired"
        granted = sent
        renewed(booted + ttl)
        retry.reset()


async def _renewed(store: Store, lease: LeaseId) -> bool:
    try:
        await store.keep_alive(lease)
    except Unavailable:
        return False
    return True
