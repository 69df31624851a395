"""One thread beside the event loop, for work that may block and that must be done in order."""

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
    """Does one thing after the other, in the order in which they came, while it is entered.

    An executor of the standard library does the same with twice the work for each, which callers wait for.
    """

    def __init__(self, name: str) -> None:
        self._works: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Returns when all that was asked for is done."""
        self._works.put(None)
        self._thread.join()

    async def run(self, work: Callable[[], R]) -> R:
        """What the work returns or raises. Once begun it is finished, also when the caller gives up."""
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.post(partial(_do, work, done))
        return await done

    def post(self, work: Callable[[], None]) -> None:
        """Have something done that gives its `answer` itself, and raises nothing."""
        self._works.put(work)

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work()


def answer(done: asyncio.Future[R], result: R | None, failure: BaseException | None = None) -> None:
    """From the thread: what became of some work, for who waits for it. One who has an answer keeps it."""
    done.get_loop().call_soon_threadsafe(_settle, done, result, failure)


def answer_all(outcomes: Sequence[tuple[asyncio.Future[None], BaseException | None]]) -> None:
    """The same for many who wait, of one loop, which is woken once."""
    outcomes[0][0].get_loop().call_soon_threadsafe(_settle_all, outcomes)


def _do(work: Callable[[], R], done: asyncio.Future[R]) -> None:
    if done.cancelled():
        return  # its caller gave up before it was begun
    try:
        result = work()
    except BaseException as error:  # carried to the caller, whatever it is
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
