"""Waiting for what should happen, with a deadline that holds on a busy machine too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from weft.runtime.backoff import Backoff

T = TypeVar("T")

# Seconds after which something that should happen is taken not to happen.
DEADLINE = 90.0


async def soon(awaitable: Awaitable[T]) -> T:
    """The result, which must come before the deadline."""
    async with asyncio.timeout(DEADLINE):
        return await awaitable


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds, which must be before the deadline."""
    backoff = Backoff(first=0.002, cap=0.05, within=DEADLINE)
    while not condition():
        await backoff.pause()


async def eventually(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool], *, within: float = DEADLINE) -> T:
    """The first answer for which it holds, which must come before the deadline; the last one is told otherwise."""
    backoff = Backoff(first=0.01, cap=0.2, within=within)
    while not holds(answer := await ask()):
        try:
            await backoff.pause()
        except TimeoutError as error:
            raise AssertionError(f"it came to {answer!r} and no further") from error
    return answer
