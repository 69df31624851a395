"""A single worker thread beside the event loop, for blocking work that must run in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeVar

R = TypeVar("R")


class WorkerThread:
    """Runs jobs one after the other, in the order of their submission, while it is entered.

    A ThreadPoolExecutor of one thread does the same at twice the overhead per job, which adds to the latency of an ADD.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Daemon: a job that hangs in the kernel must not keep the process from exiting.
        self._thread = Thread(target=self._serve, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait until all submitted jobs are done."""
        self._jobs.put(None)
        self._thread.join()

    async def run(self, work: Callable[[], R]) -> R:
        """Run a job; returns or raises what it does. Once started it is finished, even if the caller is cancelled."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.post(partial(_do, work, done))
        return await done

    def post(self, work: Callable[[], None]) -> None:
        """Submit a job that sets its own result by `answer`, and never raises."""
        self._jobs.put(work)

    def _serve(self) -> None:
        while (work := self._jobs.get()) is not None:
            work()


def answer(done: asyncio.Future[R], result: R | None, failure: BaseException | None = None) -> None:
    """Set the result of a future from the worker thread. A future that is done already stays as it is."""
    # Futures are not thread-safe.
    done.get_loop().call_soon_threadsafe(_settle, done, result, failure)


def answer_all(outcomes: Sequence[tuple[asyncio.Future[None], BaseException | None]]) -> None:
    """Set the results of many futures of one loop, which is woken only once."""
    outcomes[0][0].get_loop().call_soon_threadsafe(_settle_all, outcomes)


def _do(work: Callable[[], R], done: asyncio.Future[R]) -> None:
    if done.cancelled():
        return  # its caller was cancelled before it started
    try:
        result = work()
    except BaseException as error:  # passed on to the caller, whatever it is
        answer(done, None, error)
    else:
        answer(done, result)


def _settle_all(outcomes: Sequence[tuple[asyncio.Future[None], BaseException | None]]) -> None:
    for done, failure in outcomes:
        _settle(done, None, failure)


def _settle(done: asyncio.Future[Any], result: object, failure: BaseException | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(result)
    else:
        done.set_exception(failure)
