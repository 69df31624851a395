"""One thread beside the loop: in order, with results and failures, and nothing for callers who have given up."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from weft.lab.waiting import DEADLINE
from weft.runtime.worker_thread import WorkerThread


async def test_what_is_asked_for_is_done_in_order_on_one_other_thread() -> None:
    done: list[tuple[int, int]] = []
    with WorkerThread("beside") as thread:

        def note(number: int) -> int:
            done.append((number, threading.get_ident()))
            return number

        numbers = range(20)
        results = await asyncio.gather(*(thread.run(partial(note, number)) for number in numbers))
    assert results == [*numbers] == [number for number, _ in done]
    assert len({ident for _, ident in done} - {threading.get_ident()}) == 1


async def test_a_failure_is_the_callers_and_the_next_is_served() -> None:
    def fail() -> None:
        raise OSError("no")

    with WorkerThread("beside") as thread:
        with pytest.raises(OSError, match="no"):
            await thread.run(fail)
        assert await thread.run(lambda: 7) == 7


async def test_what_was_begun_is_finished_and_what_was_given_up_before_is_not_begun() -> None:
    begun, resume = threading.Event(), threading.Event()
    done: list[str] = []

    def long() -> None:
        begun.set()
        resume.wait(DEADLINE)
        done.append("long")

    with WorkerThread("beside") as thread:
        first = asyncio.ensure_future(thread.run(long))
        second = asyncio.ensure_future(thread.run(lambda: done.append("given up")))
        await asyncio.to_thread(begun.wait, DEADLINE)
        for caller in (first, second):
            caller.cancel()
        await asyncio.wait([first, second], timeout=DEADLINE)
        resume.set()
        await thread.run(lambda: done.append("last"))
    assert done == ["long", "last"]


async def test_the_end_waits_for_what_is_under_way() -> None:
    done: list[int] = []
    with WorkerThread("beside") as thread:
        under_way = asyncio.ensure_future(thread.run(lambda: done.append(1)))
        await asyncio.sleep(0)
    assert done == [1]
    await under_way
