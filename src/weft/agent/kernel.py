"""The agent's one thread for kernel work: the event loop never blocks, and the datapath is never called by two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

from weft.ports.datapath import Datapath, Plugging

R = TypeVar("R")


class _Asked(NamedTuple):
    """A workload that somebody waits for."""

    plugging: Plugging
    done: Future[None]


class Kernel:
    """Carries out calls of the datapath one after the other, in the order in which they came."""

    def __init__(self, datapath: Datapath, thread: ThreadPoolExecutor) -> None:
        self._datapath = datapath
        self._thread = thread
        self._together: SimpleQueue[_Asked] = SimpleQueue()
        """Workloads that wait to be plugged, with no other call between them."""

    async def call(self, work: Callable[[Datapath], R]) -> R:
        """The result of some work on the datapath. Once begun it is finished, also when the caller gives up."""
        self._together = SimpleQueue()  # whoever comes later is plugged later
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._datapath)

    async def plug(self, plugging: Plugging) -> None:
        """Plug a workload, together with those that wait for it at the same time; see `call`."""
        done: Future[None] = Future()
        self._together.put(_Asked(plugging, done))
        self._thread.submit(self._plug_waiting, self._together)
        await asyncio.wrap_future(done)

    def _plug_waiting(self, waiting: SimpleQueue[_Asked]) -> None:
        """On the thread: plug all that wait by now. Who found nobody waiting was plugged with one before."""
        asked = [each for each in _drain(waiting) if each.done.set_running_or_notify_cancel()]
        if not asked:
            return
        faults = self._datapath.plug_together([each.plugging for each in asked])
        try:
            for each, fault in zip(asked, faults, strict=True):
                each.done.set_result(None) if fault is None else each.done.set_exception(fault)
        except BaseException as error:
            for each in asked:
                if not each.done.done():
                    each.done.set_exception(error)


def _drain(waiting: SimpleQueue[_Asked]) -> Iterator[_Asked]:
    while True:
        try:
            yield waiting.get_nowait()
        except Empty:
            return


@asynccontextmanager
async def kernel_thread(open_datapath: Callable[[], AbstractContextManager[Datapath]]) -> AsyncIterator[Kernel]:
    """A kernel thread with its datapath, opened and closed on that very thread."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="kernel") as thread:
        manager = open_datapath()
        datapath = await loop.run_in_executor(thread, manager.__enter__)
        try:
            yield Kernel(datapath, thread)
        finally:
            await loop.run_in_executor(thread, manager.__exit__, None, None, None)
