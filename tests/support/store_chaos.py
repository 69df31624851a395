"""A store under load while its server, its clients or its connections are harmed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

from tests.support.store_load import Commit, CommitLog, write_on

from weft.domain.ids import StoreKey
from weft.lab.waiting import soon, until
from weft.ports.store import Revision, Store
from weft.runtime.tasks import background

WRITERS = ("a", "b", "c", "d")


class Siege:
    """What was promised to the writers, and what the watch has seen."""

    def __init__(self) -> None:
        self.acknowledged: list[Commit] = []
        self.ledger = CommitLog()

    async def goes_on(self) -> None:
        """Return when a commit that is acknowledged from now on was seen by the watch too."""
        before = len(self.acknowledged)
        await until(lambda: len(self.acknowledged) > before)
        await self.ledger.reaches(self.acknowledged[-1].revision)


async def _settled(store: Store, folder: StoreKey, ledger: CommitLog) -> Revision:
    """Wait until the watch has shown everything that is there, and compare. What was under way may still come."""
    while True:
        listing = await soon(store.list(folder))
        last = max(entry.revision for entry in listing.entries)
        await ledger.reaches(last)
        if ledger.revision == last:
            ledger.check_present({entry.key: entry.value for entry in listing.entries})
            return last


@asynccontextmanager
async def besieged(store: Store, *, prefix: str, writers: Sequence[str] = WRITERS) -> AsyncIterator[Siege]:
    """Writers and one watch, which go on while the block does harm; then the proof that nothing was lost or doubled.

    Nothing else may be under the prefix before. Others may write there as `write_on` does.
    """
    folder = StoreKey(prefix)
    since = (await soon(store.list(folder))).revision
    siege = Siege()

    async def watch(ledger: CommitLog) -> None:
        async with aclosing(store.watch(folder, since)) as changes:
            async for change in changes:
                ledger.take(change)

    async with background(watch(siege.ledger), name="watch"):
        async with AsyncExitStack() as writing:
            for writer in writers:
                work = write_on(store, prefix + writer, siege.acknowledged.append)
                await writing.enter_async_context(background(work, name=f"writer {writer}"))
            await siege.goes_on()
            yield siege
        last = await _settled(store, folder, siege.ledger)
        for commit in siege.acknowledged:
            siege.ledger.check(commit)
        again = CommitLog()
        async with background(watch(again), name="second watch"):
            await again.reaches(last)
        assert again.commits == siege.ledger.commits
