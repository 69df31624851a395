"""What becomes of work whose caller no longer waits."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.fake_datapath import request_of

from weft.agent.cni.inflight_requests import Calls, calls
from weft.cni.request import Request
from weft.lab.waiting import soon, until


class Slow:
    """Use cases that take until they are let go, and tell how they ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.go_on = asyncio.Event()
        self.story: list[str] = []

    async def serve(self, request: Request) -> bytes:
        self.begun += 1
        name = type(request).__name__
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.story.append(f"{name} undone")
            raise
        self.story.append(f"{name} done")
        return b"answer"


async def given_up(each: Calls, slow: Slow, verb: str) -> None:
    waiting = asyncio.create_task(each.serve(request_of(verb, "a")))
    await until(lambda: slow.begun == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waiting)


async def test_who_waits_gets_the_answer() -> None:
    slow = Slow()
    slow.go_on.set()
    async with calls(slow.serve) as each:
        assert await each.serve(request_of("ADD", "a")) == b"answer"


async def test_an_add_that_nobody_waits_for_is_undone() -> None:
    slow = Slow()
    async with calls(slow.serve) as each:
        await given_up(each, slow, "ADD")
        await until(lambda: slow.story == ["Add undone"])


async def test_a_del_that_nobody_waits_for_is_carried_to_its_end() -> None:
    slow = Slow()
    async with calls(slow.serve) as each:
        await given_up(each, slow, "DEL")
        slow.go_on.set()
        await until(lambda: slow.story == ["Del done"])


async def test_a_late_failure_disturbs_nobody() -> None:
    slow = Slow()

    async def fail(request: Request) -> bytes:
        await slow.serve(request)
        raise OSError("the disk is full")

    async with calls(fail) as each:
        await given_up(each, slow, "DEL")
        slow.go_on.set()
        await until(lambda: slow.story == ["Del done"])


async def test_nothing_is_under_way_at_the_end() -> None:
    slow = Slow()
    async with calls(slow.serve) as each:
        await given_up(each, slow, "DEL")
    assert slow.story == ["Del undone"]
