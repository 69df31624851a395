"""The agent's one thread for kernel work: the event loop never blocks, and the datapath is never called by two."""

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


class _Asked(NamedTuple):
    """A workload that somebody waits for."""

    plugging: PlugRequest
    done: asyncio.Future[None]


class DatapathExecutor:
    """Carries out calls of the datapath one after the other, in the order in which they came."""

    def __init__(self, datapath: Datapath, thread: WorkerThread) -> None:
        self._datapath = datapath
        self._thread = thread
        # Workloads that wait to be plugged, with no other call between them.
        self._together: SimpleQueue[_Asked] = SimpleQueue()

    async def call(self, work: Callable[[Datapath], R]) -> R:
        """The result of some work on the datapath. Once begun it is finished, also when the caller gives up."""
        self._together = SimpleQueue()  # whoever comes later is plugged later
        return await self._thread.run(partial(work, self._datapath))

    async def plug(self, plugging: PlugRequest) -> None:
        """Plug a workload, together with those that wait for it at the same time; see `call`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._together.put(_Asked(plugging, done))
        self._thread.post(partial(self._plug_waiting, self._together))
        await done

    def _plug_waiting(self, waiting: SimpleQueue[_Asked]) -> None:
        """On the thread: plug all that wait by now. Who found nobody waiting was plugged with one before."""
        asked = [each for each in _drain(waiting) if not each.done.cancelled()]
        if not asked:
            return
        faults: list[BaseException | None] = []
        try:
            for fault in self._datapath.plug_together([each.plugging for each in asked]):
                faults.append(fault)  # noqa: PERF402  those that are known count, whatever becomes of the others
        except BaseException as error:  # carried to those who have no answer yet, whatever it is
            faults += [error] * (len(asked) - len(faults))
        answer_all([(each.done, fault) for each, fault in zip(asked, faults, strict=True)])


def _drain(waiting: SimpleQueue[_Asked]) -> Iterator[_Asked]:
    while True:
        try:
            yield waiting.get_nowait()
        except Empty:
            return


@asynccontextmanager
async def kernel_thread(
    open_datapath: Callable[[], AbstractContextManager[Datapath]],
) -> AsyncIterator[DatapathExecutor]:
    """A kernel thread with its datapath, opened and closed on that very thread."""
    with WorkerThread("kernel") as thread:
        manager = open_datapath()
        datapath = await thread.run(manager.__enter__)
        try:
            yield DatapathExecutor(datapath, thread)
        finally:
            await thread.run(partial(manager.__exit__, None, None, None))
