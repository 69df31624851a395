"""The one place that waits before trying again."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Growing pauses between tries, with jitter, so that many who failed together do not come back together.

    A pause is a random part (half to whole) of a step, which doubles up to `cap`. With `within` (seconds from now) the
    tries end: `pause` raises `TimeoutError` rather than wait past that moment.
    """

    def __init__(self, *, first: float = 0.05, cap: float = 2.0, within: float | None = None) -> None:
        self._first = first
        self._cap = cap
        self._step = first
        self._deadline = None if within is None else asyncio.get_running_loop().time() + within

    def reset(self) -> None:
        """A try succeeded: the next pause is the first again."""
        self._step = self._first

    async def pause(self, *, until: asyncio.Event | None = None) -> None:
        """Wait before the next try; where there is an event that promises success, not longer than until it is set."""
        delay = self._step * random.uniform(0.5, 1.0)  # noqa: S311  jitter is not a secret
        if self._deadline is not None and asyncio.get_running_loop().time() + delay > self._deadline:
            raise TimeoutError("no time is left for another try")
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
