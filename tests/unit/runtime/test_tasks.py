"""Work beside a block ends with it, and its failure ends the block."""

from __future__ import annotations

import asyncio

import pytest

from weft.runtime.tasks import background


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    raise ValueError("the work failed")


async def test_the_work_is_cancelled_when_the_block_ends() -> None:
    before = asyncio.all_tasks()
    async with background(for_ever(), name="work"):
        assert {task.get_name() for task in asyncio.all_tasks() - before} == {"work"}
    assert asyncio.all_tasks() == before


async def test_a_failure_of_the_work_ends_the_block_and_is_raised() -> None:
    with pytest.raises(ValueError, match="the work failed"):
        async with background(fails(), name="work"):
            await asyncio.Event().wait()
    await asyncio.sleep(0)  # nothing of the cancellation is left


async def test_a_failure_just_before_the_block_ends_is_raised_too() -> None:
    with pytest.raises(ValueError, match="the work failed"):
        async with background(fails(), name="work"):
            await asyncio.sleep(0)


async def test_the_exceptions_of_the_block_pass_unchanged() -> None:
    with pytest.raises(KeyError):
        async with background(for_ever(), name="work"):
            raise KeyError("block")


async def test_work_that_ends_by_itself_does_not_disturb() -> None:
    async def ends() -> None:
        pass

    async with background(ends(), name="work"):
        await asyncio.sleep(0.01)


async def test_cancelling_the_owner_cancels_both() -> None:
    before = asyncio.all_tasks()

    async def owner() -> None:
        async with background(for_ever(), name="work"):
            await asyncio.Event().wait()

    task = asyncio.create_task(owner())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before


async def test_cancelling_the_owner_goes_before_a_failure_of_the_work() -> None:
    async def owner() -> None:
        async with background(fails(), name="work"):
            this = asyncio.current_task()
            assert this is not None
            this.cancel()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(owner())
