"""Exponential backoff with jitter: the one place that sleeps before a retry."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Exponential backoff. The jitter spreads the retries of clients that failed at the same moment.

    A pause is 50 to 100 % of a step, which doubles up to `cap`. With `within` (seconds from now) `pause` raises
    `TimeoutError` instead of sleeping past that moment.
    """

    def __init__(self, *, first: float = 0.05, cap: float = 2.0, within: float | None = None) -> None:
        self._first = first
        self._cap = cap
        self._step = first
        self._deadline = None if within is None else asyncio.get_running_loop().time() + within

    def reset(self) -> None:
        """Start again with the first pause, after a success."""
        self._step = self._first

    # Checked before sleeping: a caller with a deadline should fail early.
    async def pause(self, *, until: asyncio.Event | None = None) -> None:
        """Sleep before the next attempt, at most until the event is set that makes success likely."""
        delay = self._step * random.uniform(0.5, 1.0)  # noqa: S311  jitter is not a secret
        if self._deadline is not None and asyncio.get_running_loop().time() + delay > self._deadline:
            raise TimeoutError("no time left for another attempt")
        self._step = min(self._step * 2, self._cap)
        if until is None:
            await asyncio.sleep(delay)
        else:
            await wait_event(until, within=delay)


async def wait_event(event: asyncio.Event, *, within: float) -> bool:
    """Whether the event is set before `within` seconds have passed; returns as soon as it is."""
    try:
        async with asyncio.timeout(within):
            await event.wait()
    except TimeoutError:
        return False
    return True
