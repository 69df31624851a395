"""Embedded store: one SQLite file, opened by one process, durable across kill -9 and power loss.

One connection on one thread executes all SQL. Concurrent commits share one SQL transaction, and so one fsync, each with
its own result and revision.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from weft.adapters.stores.sqlite_file import StoreFile, Transaction
from weft.domain.errors import Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Compare, Entry, LeaseId, Listing, Revision, Write
from weft.runtime.store.feed import Feed
from weft.runtime.store.group_commit import GroupCommit, check_writes
from weft.runtime.store.leases import LeaseClock

DEFAULT_HISTORY = 10_000
# Changes kept in memory; watchers that are further behind read the log table.
_RECENT = 1_000
# Seconds after which a disk that does not respond is reported.
_DISK_TIMEOUT_S = 10.0

P = ParamSpec("P")
T = TypeVar("T")
_Step = Callable[[Transaction], Revision]


class SqliteStore:
    """See `ports.store`. Leases of the previous process restart their time to live when the file is opened."""

    def __init__(self, path: Path, *, history: int) -> None:
        self._path = path
        self._history = history
        self._opened: _Opened | None = None

    async def read(self, key: StoreKey) -> Entry | None:
        async with _disk_timeout():
            return await self._when_open().reads.submit(key)

    async def list(self, prefix: StoreKey) -> Listing:
        opened = self._when_open()
        return await opened.call(opened.file.list_under, prefix)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        check_writes(writes)
        return await self._when_open().do(lambda transaction: transaction.commit(compares, writes))

    def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        return self._when_open().feed.watch(prefix, since)

    async def grant(self, ttl: float) -> LeaseId:
        opened = self._when_open()
        # Random: ids of a previous process must not be reused. 62 bits fit into SQLite's integers.
        lease = LeaseId(secrets.randbits(62))
        # The timer starts first, so that a lease whose grant is cancelled half-way expires as well.
        opened.leases.start(lease, ttl)
        await opened.do(lambda transaction: transaction.grant(lease, ttl))
        return lease

    async def keep_alive(self, lease: LeaseId) -> None:
        self._when_open().leases.keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        opened = self._when_open()
        opened.leases.forget(lease)
        async with _disk_timeout():
            await opened.end(lease)

    async def __aenter__(self) -> Self:
        self._opened = await _open(self._path, history=self._history)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        opened = self._when_open()
        self._opened = None
        await opened.close()

    def _when_open(self) -> _Opened:
        if self._opened is None:
            raise Unavailable(f"store file {self._path} is not open")
        return self._opened


class _Opened:
    """State of an open store: the file, its thread, the queue of commits, the feed, the leases."""

    def __init__(self, file: StoreFile, thread: ThreadPoolExecutor, leases: Sequence[tuple[LeaseId, float]]) -> None:
        self.file = file
        self.feed = Feed(revision=file.revision, keep=min(_RECENT, file.history), older=self._older)
        self.leases = LeaseClock(self.end)
        self._thread = thread
        self._loop = asyncio.get_running_loop()
        self._commits: GroupCommit[_Step, Revision] = GroupCommit(self._execute)
        self.reads: GroupCommit[StoreKey, Entry | None] = GroupCommit(self._read_all)
        for lease, ttl in leases:
            self.leases.start(lease, ttl)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the file on its thread."""
        async with _disk_timeout():
            return await self._loop.run_in_executor(self._thread, partial(function, *args, **kwargs))

    async def do(self, step: _Step) -> Revision:
        """Execute a step durably."""
        async with _disk_timeout():
            return await self._commits.submit(step)

    def end(self, lease: LeaseId) -> asyncio.Future[Revision]:
        """Delete a lease and its keys. When that fails or is cancelled, it is tried again a little later."""

        def try_again(ended: asyncio.Future[Revision]) -> None:
            if ended.cancelled() or ended.exception() is not None:
                self.leases.start(lease, _DISK_TIMEOUT_S)

        ended = self._commits.submit(lambda transaction: transaction.end(lease))
        ended.add_done_callback(try_again)
        return ended

    async def close(self) -> None:
        self.leases.close()
        async with _disk_timeout():
            await self._commits.close()
            await self.reads.close()
        # After the queues: their last commits still reach watchers.
        self.feed.close()
        await self.call(self.file.close)
        # The thread is idle by now, unless the disk hangs; then we must not hang too.
        self._thread.shutdown(wait=False)

    async def _execute(self, steps: Sequence[_Step]) -> Sequence[Revision | Exception]:
        return await self._loop.run_in_executor(self._thread, self._transact, steps)

    async def _read_all(self, keys: Sequence[StoreKey]) -> Sequence[Entry | None]:
        """Keys that are requested at the same time are read in one call to the thread."""
        return await self._loop.run_in_executor(self._thread, lambda: [self.file.read(key) for key in keys])

    def _transact(self, steps: Sequence[_Step]) -> Sequence[Revision | Exception]:
        results, changes = self.file.transact(steps)
        if changes:
            # From the thread, so that watchers get a revision before the committer can tell anyone about it.
            self._loop.call_soon_threadsafe(self.feed.publish, changes)
        return results

    async def _older(self, since: Revision) -> Sequence[Change]:
        return await self.call(self.file.changes_after, since)


async def _open(path: Path, *, history: int) -> _Opened:
    # One thread: SQLite connections are not shared between threads.
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weft-sqlite")
    loop = asyncio.get_running_loop()
    try:
        file = await loop.run_in_executor(thread, partial(StoreFile, path, history=history))
        return _Opened(file, thread, await loop.run_in_executor(thread, file.leases))
    except BaseException:
        thread.shutdown(wait=False)
        raise


@asynccontextmanager
async def _disk_timeout() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_DISK_TIMEOUT_S):
            yield
    except TimeoutError as error:
        raise Unavailable(f"the disk did not respond within {_DISK_TIMEOUT_S:.0f} s") from error


def open_store(path: Path | str, *, history: int = DEFAULT_HISTORY) -> SqliteStore:
    """The store in this file, created if absent; at least the last `history` revisions are kept for watchers."""
    return SqliteStore(Path(path), history=max(history, 1))
