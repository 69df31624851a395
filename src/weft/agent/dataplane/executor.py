"""Runs all datapath calls on one thread: the event loop never blocks, and no two calls run at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from weft.ports.datapath import Datapath, PlugRequest
from weft.runtime.worker_thread import WorkerThread, answer_all

R = TypeVar("R")


class _Pending(NamedTuple):
    """A plug request whose caller waits."""

    request: PlugRequest
    done: asyncio.Future[None]


class DatapathExecutor:
    """Runs datapath calls one after the other, in the order of the calls."""

    def __init__(self, datapath: Datapath, thread: WorkerThread) -> None:
        self._datapath = datapath
        self._thread = thread
        # Plug requests with no other call between them: one transaction of kernel or switch serves them all.
        self._batch: SimpleQueue[_Pending] = SimpleQueue()

    async def call(self, work: Callable[[Datapath], R]) -> R:
        """The result of a function of the datapath. Once started it is finished, even if the caller is cancelled."""
        # A new batch: a request that comes after this call must not be plugged before it.
        self._batch = SimpleQueue()
        return await self._thread.run(partial(work, self._datapath))

    async def plug(self, request: PlugRequest) -> None:
        """Plug an endpoint, in one batch with others that wait at the same time; see `call`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._batch.put(_Pending(request, done))
        self._thread.post(partial(self._plug_waiting, self._batch))
        await done

    def _plug_waiting(self, waiting: SimpleQueue[_Pending]) -> None:
        """On the datapath thread: plug all requests that wait by now."""
        pending = [each for each in _drain(waiting) if not each.done.cancelled()]
        if not pending:
            return  # an earlier call has plugged this one's request with its own
        faults: list[BaseException | None] = []
        try:
            for fault in self._datapath.plug_batch([each.request for each in pending]):
                faults.append(fault)  # noqa: PERF402  results so far count, even if the batch fails later
        except BaseException as error:  # raised in every caller that has no result yet
            faults += [error] * (len(pending) - len(faults))
        answer_all([(each.done, fault) for each, fault in zip(pending, faults, strict=True)])


def _drain(waiting: SimpleQueue[_Pending]) -> Iterator[_Pending]:
    while True:
        try:
            yield waiting.get_nowait()
        except Empty:
            return


@asynccontextmanager
async def datapath_thread(
    open_datapath: Callable[[], AbstractContextManager[Datapath]],
) -> AsyncIterator[DatapathExecutor]:
    """An executor with its datapath, which is opened and closed on the thread that uses it."""
    with WorkerThread("datapath") as thread:
        manager = open_datapath()
        datapath = await thread.run(manager.__enter__)
        try:
            yield DatapathExecutor(datapath, thread)
        finally:
            await thread.run(partial(manager.__exit__, None, None, None))
