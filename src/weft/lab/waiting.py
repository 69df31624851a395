"""Waits for conditions, with a deadline that is long enough for a busy machine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from weft.runtime.backoff import Backoff

T = TypeVar("T")

# Seconds after which a wait fails. Long, because CI machines with two cores run several labs at once.
DEADLINE = 90.0


async def soon(awaitable: Awaitable[T]) -> T:
    """The result; `TimeoutError` after the deadline."""
    async with asyncio.timeout(DEADLINE):
        return await awaitable


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds; `TimeoutError` after the deadline."""
    backoff = Backoff(first=0.002, cap=0.05, within=DEADLINE)
    # Polling: conditions are about the kernel and other processes, which send no event.
    while not condition():
        await backoff.pause()


async def eventually(read: Callable[[], Awaitable[T]], holds: Callable[[T], bool], *, within: float = DEADLINE) -> T:
    """Read until the condition holds, and return the value; `AssertionError` with the last one after the deadline."""
    backoff = Backoff(first=0.01, cap=0.2, within=within)
    while not holds(value := await read()):
        try:
            await backoff.pause()
        except TimeoutError as error:
            raise AssertionError(f"condition not met within {within:g} s; the last value was {value!r}") from error
    return value
