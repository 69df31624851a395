"""A store under load while its server, clients or connections fail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from tests.support.store_load import Commit, CommitLog, write_on

from weft.domain.ids import StoreKey
from weft.lab.waiting import soon, until
from weft.ports.store import Revision, Store
from weft.runtime.tasks import background

WRITERS = ("a", "b", "c", "d")


class StoreChaos:
    """The acknowledged commits of the writers, and the changes that the watch has seen."""

    def __init__(self) -> None:
        self.acknowledged: list[Commit] = []
        self.log = CommitLog()

    async def wait_for_progress(self) -> None:
        """Return when a commit acknowledged after this call was seen by the watch too."""
        before = len(self.acknowledged)
        await until(lambda: len(self.acknowledged) > before)
        await self.log.wait_for(self.acknowledged[-1].revision)


async def _compare_when_stable(store: Store, folder: StoreKey, log: CommitLog) -> Revision:
    """Wait until the watch has seen the current state, and compare. Unacknowledged commits may still arrive."""
    while True:
        listing = await soon(store.list(folder))
        last = max(entry.revision for entry in listing.entries)
        await log.wait_for(last)
        if log.revision == last:
            log.check_present({entry.key: entry.value for entry in listing.entries})
            return last


@asynccontextmanager
async def under_chaos(store: Store, *, prefix: str, writers: Sequence[str] = WRITERS) -> AsyncIterator[StoreChaos]:
    """Run writers and one watch while the block causes faults, then assert that no commit was lost or doubled.

    The prefix must be empty before. Other processes may write there with `write_on`.
    """
    folder = StoreKey(prefix)
    since = (await soon(store.list(folder))).revision
    chaos = StoreChaos()

    async def watch(log: CommitLog) -> None:
        async with aclosing(store.watch(folder, since)) as changes:
            async for change in changes:
                log.take(change)

    async with background(watch(chaos.log), name="watch"):
        async with AsyncExitStack() as writing:
            for writer in writers:
                work = write_on(store, prefix + writer, chaos.acknowledged.append)
                await writing.enter_async_context(background(work, name=f"writer {writer}"))
            await chaos.wait_for_progress()
            yield chaos
        last = await _compare_when_stable(store, folder, chaos.log)
        for commit in chaos.acknowledged:
            chaos.log.check(commit)
        again = CommitLog()
        async with background(watch(again), name="second watch"):
            await again.wait_for(last)
        assert again.commits == chaos.log.commits
