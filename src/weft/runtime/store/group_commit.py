"""Group commit: jobs that arrive while a commit is in flight are executed together by the next one."""

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
    """`Invalid` if one commit writes a key twice."""
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
    """Execute all waiting jobs together."""
    return range(len(waiting))


class GroupCommit(Generic[Job, Result]):
    """A queue whose jobs are executed in groups, at most `in_flight` groups at once.

    `choose` returns the positions of the waiting jobs that form the next group, the first job among them. `execute`
    returns one result or exception for each job of a group; if it raises, every job of the group fails with that. Jobs
    that are cancelled before their turn are never executed.
    """

    def __init__(
        self,
        execute: Callable[[Sequence[Job]], Awaitable[Sequence[Result | Exception]]],
        *,
        choose: Callable[[Sequence[Job]], Sequence[int]] = take_all,
        in_flight: int = 1,
    ) -> None:
        self._execute = execute
        self._choose = choose
        self._in_flight = in_flight
        self._waiting: deque[tuple[Job, asyncio.Future[Result]]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._closed = False

    def submit(self, job: Job) -> asyncio.Future[Result]:
        """Enqueue a job; the future gets its result or exception."""
        if self._closed:
            raise Unavailable("the store was closed")
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, done))
        # A worker per group in flight, started on demand; an idle queue has no task.
        if len(self._workers) < self._in_flight:
            self._workers.add(asyncio.create_task(self._work(), name="group-commit"))
        return done

    async def close(self) -> None:
        """Accept no more jobs, and wait until the accepted ones are done."""
        self._closed = True
        while self._workers:
            await asyncio.wait(self._workers)

    async def _work(self) -> None:
        while group := self._next_group():
            try:
                results = await self._execute([job for job, _ in group])
            except Exception as error:
                results = [error] * len(group)
            for (_, done), result in zip(group, results, strict=True):
                if done.done():
                    continue  # its caller was cancelled meanwhile
                if isinstance(result, Exception):
                    done.set_exception(result)
                else:
                    done.set_result(result)
        # Here, not in a done callback: a job that is submitted in between would wait for a worker that has ended.
        this = asyncio.current_task()
        assert this is not None
        self._workers.remove(this)

    def _next_group(self) -> Sequence[tuple[Job, asyncio.Future[Result]]]:
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        self._waiting.clear()
        if not waiting:
            return ()
        # Jobs that are not chosen keep their order for the next group.
        chosen = set(self._choose([job for job, _ in waiting]))
        self._waiting.extend(entry for position, entry in enumerate(waiting) if position not in chosen)
        return [waiting[position] for position in sorted(chosen)]
