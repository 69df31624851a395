"""Background tasks that never outlive the block that starts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def background(work: Coroutine[object, object, None], *, name: str) -> AsyncIterator[None]:
    """Run a coroutine as a task while the block runs, and cancel it at the end.

    If the task fails, the block is cancelled and the exception of the task is raised. Exceptions of the block pass
    through unchanged. A task that returns does not affect the block.
    """
    owner = asyncio.current_task()
    assert owner is not None
    task = asyncio.create_task(work, name=name)
    # Distinguishes our cancellation of the owner from one by its parent.
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
            await asyncio.wait([task])  # wait() neither raises nor cancels, unlike `await task`
    except asyncio.CancelledError:
        if not failed or owner.uncancel() > 0:
            raise  # the owner was cancelled from outside too: that takes precedence
        task.result()
