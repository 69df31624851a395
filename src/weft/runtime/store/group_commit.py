"""Group commit: what is asked for while a commit is under way is carried out together by the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from weft.domain.errors import Invalid, Unavailable
from weft.ports.store import DeleteAll, Write

Job = TypeVar("Job")
Result = TypeVar("Result")


def check_writes(writes: Sequence[Write]) -> None:
    """`Invalid` when one commit would write a key twice."""
    keys = [write.key for write in writes if not isinstance(write, DeleteAll)]
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise Invalid(f"key {twice!r} is written twice in one commit")
    if len(keys) == len(writes):
        return
    for write in writes:
        if isinstance(write, DeleteAll) and any(key.startswith(write.prefix) for key in keys):
            raise Invalid(f"a key under {write.prefix!r} is written in the commit that deletes the prefix")


def take_all(waiting: Sequence[object]) -> Sequence[int]:
    """Every waiting job goes together."""
    return range(len(waiting))


class GroupCommit(Generic[Job, Result]):
    """A queue whose jobs are carried out in groups, at most `in_flight` groups at once.

    `choose` is given the waiting jobs and answers which of them go together (their positions, the first among them);
    `carry_out` answers one outcome for each job of a group, a result or the exception its asker shall see. When it
    raises instead, every asker of the group sees that. Jobs that were given up before their turn are never carried out.
    """

    def __init__(
        self,
        carry_out: Callable[[Sequence[Job]], Awaitable[Sequence[Result | Exception]]],
        *,
        choose: Callable[[Sequence[Job]], Sequence[int]] = take_all,
        in_flight: int = 1,
    ) -> None:
        self._carry_out = carry_out
        self._choose = choose
        self._in_flight = in_flight
        self._waiting: deque[tuple[Job, asyncio.Future[Result]]] = deque()
        self._carriers: set[asyncio.Task[None]] = set()
        self._closed = False

    def ask(self, job: Job) -> asyncio.Future[Result]:
        """Have the job carried out; the future gets its result or its exception."""
        if self._closed:
            raise Unavailable("the store was closed")
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, done))
        if len(self._carriers) < self._in_flight:
            self._carriers.add(asyncio.create_task(self._carry(), name="group-commit"))
        return done

    async def close(self) -> None:
        """Take no more jobs, and return when those already asked for are done."""
        self._closed = True
        while self._carriers:
            await asyncio.wait(self._carriers)

    async def _carry(self) -> None:
        while group := self._next_group():
            try:
                outcomes = await self._carry_out([job for job, _ in group])
            except Exception as error:
                outcomes = [error] * len(group)
            for (_, done), outcome in zip(group, outcomes, strict=True):
                if done.done():
                    continue  # its asker was cancelled meanwhile
                if isinstance(outcome, Exception):
                    done.set_exception(outcome)
                else:
                    done.set_result(outcome)
        # Here and not when the task is done, or a job asked for in between would wait for a carrier that has left.
        this = asyncio.current_task()
        assert this is not None
        self._carriers.remove(this)

    def _next_group(self) -> Sequence[tuple[Job, asyncio.Future[Result]]]:
        waiting = [asked for asked in self._waiting if not asked[1].done()]
        self._waiting.clear()
        if not waiting:
            return ()
        chosen = set(self._choose([job for job, _ in waiting]))
        self._waiting.extend(asked for position, asked in enumerate(waiting) if position not in chosen)
        return [waiting[position] for position in sorted(chosen)]
