"""Commits that are asked for while one is under way are carried out together by the next."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from weft.domain.errors import Invalid, Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.domain.store_types import Delete, DeleteAll, Put, Write
from weft.runtime.store.group_commit import GroupCommit, check_writes


class Carrier:
    """Executes numbers on command; odd ones above 100 fail."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.at_once = 0
        self.most_at_once = 0
        self.go = asyncio.Event()

    async def __call__(self, jobs: Sequence[int]) -> Sequence[int | Exception]:
        self.groups.append(list(jobs))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await self.go.wait()
        self.at_once -= 1
        return [Stale(f"{job}") if job > 100 and job % 2 else job * 10 for job in jobs]


async def start(queue: GroupCommit[int, int], *jobs: int) -> list[asyncio.Future[int]]:
    """Ask for the jobs, and let the queue see them."""
    asked = [queue.submit(job) for job in jobs]
    await asyncio.sleep(0)
    return asked


async def test_what_waits_goes_together() -> None:
    carrier = Carrier()
    queue = GroupCommit(carrier)
    first = await start(queue, 1)
    rest = await start(queue, 2, 3, 4)
    carrier.go.set()
    assert await asyncio.gather(*first, *rest) == [10, 20, 30, 40]
    assert carrier.groups == [[1], [2, 3, 4]]


async def test_each_job_has_its_own_outcome() -> None:
    carrier = Carrier()
    carrier.go.set()
    queue = GroupCommit(carrier)
    outcomes = await asyncio.gather(*await start(queue, 1, 101, 102), return_exceptions=True)
    assert outcomes[0] == 10
    assert isinstance(outcomes[1], Stale)
    assert outcomes[2] == 1020


async def test_a_carrier_that_fails_fails_its_whole_group() -> None:
    async def broken(_: Sequence[int]) -> Sequence[int | Exception]:
        raise Unavailable("no answer")

    queue: GroupCommit[int, int] = GroupCommit(broken)
    outcomes = await asyncio.gather(*await start(queue, 1, 2), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Unavailable, Unavailable]
    with pytest.raises(Unavailable):
        await queue.submit(3)


async def test_at_most_so_many_groups_are_under_way() -> None:
    carrier = Carrier()
    queue = GroupCommit(carrier, in_flight=2)
    asked = [*await start(queue, 1), *await start(queue, 2), *await start(queue, 3, 4, 5)]
    assert carrier.groups == [[1], [2]]
    carrier.go.set()
    await asyncio.gather(*asked)
    assert carrier.most_at_once == 2


async def test_what_is_not_chosen_waits_for_the_next_group() -> None:
    def even_with_the_first(waiting: Sequence[int]) -> Sequence[int]:
        return [0, *(position for position, job in enumerate(waiting) if position and job % 2 == 0)]

    carrier = Carrier()
    queue = GroupCommit(carrier, choose=even_with_the_first)
    asked = [*await start(queue, 1), *await start(queue, 3, 4, 5, 6)]
    carrier.go.set()
    await asyncio.gather(*asked)
    assert carrier.groups == [[1], [3, 4, 6], [5]]


async def test_a_job_given_up_before_its_turn_is_not_carried_out() -> None:
    carrier = Carrier()
    queue = GroupCommit(carrier)
    first = await start(queue, 1)
    (given_up, kept) = await start(queue, 2, 3)
    given_up.cancel()
    carrier.go.set()
    assert await asyncio.gather(*first, kept) == [10, 30]
    assert carrier.groups == [[1], [3]]


async def test_a_job_given_up_while_under_way_does_not_harm_the_others() -> None:
    carrier = Carrier()
    queue = GroupCommit(carrier)
    given_up, kept = await start(queue, 1, 2)
    given_up.cancel()
    carrier.go.set()
    assert await kept == 20


async def test_closing_waits_for_what_was_asked_and_takes_no_more() -> None:
    carrier = Carrier()
    queue = GroupCommit(carrier)
    (asked,) = await start(queue, 1)
    closing = asyncio.create_task(queue.close())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable):
        queue.submit(2)
    carrier.go.set()
    await closing
    assert asked.result() == 10


async def test_a_job_asked_for_in_the_moment_in_which_the_last_one_ends_is_carried_out() -> None:
    carrier = Carrier()
    carrier.go.set()
    queue = GroupCommit(carrier)
    for job in range(50):
        assert await asyncio.wait_for(queue.submit(job), 30) == job * 10


A, B = StoreKey("a/1"), StoreKey("b/1")


@pytest.mark.parametrize(
    "writes",
    [
        [Put(A, b""), Put(A, b"")],
        [Put(A, b""), Delete(A)],
        [DeleteAll(StoreKey("a/")), Put(A, b"")],
        [Delete(A), DeleteAll(StoreKey(""))],
    ],
)
def test_a_key_is_written_once_in_a_commit(writes: list[Write]) -> None:
    with pytest.raises(Invalid):
        check_writes(writes)


def test_different_keys_may_be_written() -> None:
    check_writes([])
    check_writes([Put(A, b""), Delete(B), DeleteAll(StoreKey("c/")), DeleteAll(StoreKey("a/2"))])
