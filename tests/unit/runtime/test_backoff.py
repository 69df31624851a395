"""Pauses grow, are capped, and end at their deadline."""

from __future__ import annotations

import asyncio

import pytest

from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff, wait_event


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each pause would have been."""
    recorded: list[float] = []

    async def sleep(delay: float) -> None:
        recorded.append(delay)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return recorded


async def test_pauses_double_up_to_the_cap(pauses: list[float]) -> None:
    backoff = Backoff(first=1.0, cap=4.0)
    for _ in range(5):
        await backoff.pause()
    for pause, step in zip(pauses, [1, 2, 4, 4, 4], strict=True):
        assert step / 2 <= pause <= step


async def test_a_success_starts_small_again(pauses: list[float]) -> None:
    backoff = Backoff(first=1.0, cap=100.0)
    for _ in range(5):
        await backoff.pause()
    backoff.reset()
    await backoff.pause()
    assert pauses[-1] <= 1.0


async def test_no_pause_goes_past_the_deadline(pauses: list[float]) -> None:
    backoff = Backoff(first=1.0, cap=1000.0, within=100.0)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            await backoff.pause()
    assert max(pauses) <= 100.0


async def test_an_event_that_is_set_is_noticed_at_once() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_event(event, within=1000.0))
    await asyncio.sleep(0)
    event.set()
    assert await waiting


async def test_an_event_that_is_not_set_is_given_up() -> None:
    assert not await wait_event(asyncio.Event(), within=0.01)


async def test_a_pause_ends_when_success_is_promised() -> None:
    promised = asyncio.Event()
    backoff = Backoff(first=DEADLINE, cap=DEADLINE)
    asyncio.get_running_loop().call_soon(promised.set)
    async with asyncio.timeout(DEADLINE / 4):
        await backoff.pause(until=promised)
