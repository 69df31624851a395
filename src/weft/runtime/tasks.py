"""Work that runs beside a block of code and never outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def background(work: Coroutine[object, object, None], *, name: str) -> AsyncIterator[None]:
    """Run the work while the block runs, and cancel it at the end.

    When the work fails, the block is cancelled and the work's own exception is raised; the exceptions of the block pass
    unchanged. Work that ends by itself does not disturb the block.
    """
    owner = asyncio.current_task()
    assert owner is not None
    task = asyncio.create_task(work, name=name)
    failed = False

    def interrupt(done: asyncio.Task[None]) -> None:
        nonlocal failed
        if not done.cancelled() and done.exception() is not None:
            failed = True
            owner.cancel()

    task.add_done_callback(interrupt)
    try:
        try:
            yield
        finally:
            task.remove_done_callback(interrupt)
            task.cancel()
            await asyncio.wait([task])
    except asyncio.CancelledError:
        if not failed or owner.uncancel() > 0:
            raise  # someone else wants the owner to end: that goes first
        task.result()
