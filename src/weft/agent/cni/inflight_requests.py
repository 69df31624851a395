"""Requests under way, each on a task of its own, so that a caller who stops waiting cuts nothing in half."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from weft.cni.request import Add, Request
from weft.runtime.logs import Log

log = Log("calls")

# How long what is under way may take to come to an end when the agent stops; the ledger knows what did not.
END_WITHIN_S = 10.0

Serve = Callable[[Request], Awaitable[bytes]]


class Calls:
    """The use cases, for doors whose callers may hang up or run out of time.

    A caller that stops waiting is answered no more. Its ADD is undone, for its runtime takes it for failed; everything
    else is carried to its end, because what it frees is to be freed all the same.
    """

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._under_way: set[asyncio.Future[bytes]] = set()

    async def serve(self, request: Request) -> bytes:
        """As the use cases answer. May be cancelled at any time, and ends at once then."""
        work = asyncio.ensure_future(self._serve(request))
        self._under_way.add(work)
        work.add_done_callback(self._under_way.discard)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_tell_failure)
            if isinstance(request, Add):
                work.cancel()
            raise

    async def finish(self) -> None:
        """Cancel what is under way, and wait for its end."""
        under_way = set(self._under_way)
        for work in under_way:
            work.cancel()
        if under_way:
            await asyncio.wait(under_way, timeout=END_WITHIN_S)


@asynccontextmanager
async def calls(serve: Serve) -> AsyncIterator[Calls]:
    """Calls while the block runs; none is under way afterwards."""
    open_calls = Calls(serve)
    try:
        yield open_calls
    finally:
        await open_calls.finish()


def _tell_failure(work: asyncio.Future[bytes]) -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        log.warning("a call that nobody waited for has failed", reason=str(error))
