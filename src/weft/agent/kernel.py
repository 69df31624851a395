"""The agent's one thread for kernel work: the event loop never blocks, and the datapath is never called by two."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from typing import TypeVar

from weft.ports.datapath import Datapath

R = TypeVar("R")


class Kernel:
    """Carries out calls of the datapath one after the other, in the order in which they came."""

    def __init__(self, datapath: Datapath, thread: ThreadPoolExecutor) -> None:
        self._datapath = datapath
        self._thread = thread

    async def call(self, work: Callable[[Datapath], R]) -> R:
        """The result of some work on the datapath. Once begun it is finished, also when the caller gives up."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._datapath)


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
