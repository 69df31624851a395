"""The optimistic commit loop: plan on a snapshot, commit with compares, and plan again when the state moved."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

from weft.domain.cluster import Cluster
from weft.domain.errors import Stale, Unavailable, WeftError
from weft.domain.store_types import DeleteAll, Event, Put, Revision, Write
from weft.domain.transaction import ReadSet, Transaction
from weft.runtime.store.mirror import Mirror

R = TypeVar("R")
# A pure decision: its result, and the transaction that realizes it.
Plan = Callable[[ReadSet], tuple[R, Transaction]]

# Attempts that take turns conflict only with other processes, so that this many failures mean a real overload.
TRIES = 20
# How long to wait for the change that made a commit stale, before planning again without it.
CATCH_UP_S = 0.25


class TooManyConflicts(Unavailable):
    """Every attempt met a conflicting write. Nothing was written, unlike after an `Unavailable` of the store."""


async def retry_stale(
    attempt: Callable[[], Awaitable[R]],
    *,
    catch_up: Callable[[Stale], Awaitable[None]] | None = None,
    tries: int = TRIES,
    exhausted: type[WeftError] = TooManyConflicts,
) -> R:
    """Run the attempt until it raises no `Stale`; raises `exhausted` after that many tries.

    `catch_up` refreshes after a conflict what the next attempt reads. It raises to end the loop.
    """
    for _ in range(tries):
        try:
            return await attempt()
        except Stale as conflict:
            if catch_up is not None:
                await catch_up(conflict)
    raise exhausted("too many conflicting writes: try again")


def _hold_nothing(_: Transaction) -> AbstractContextManager[None]:
    return nullcontext()


class CommitLoop:
    """Commits plans that are made on a mirrored cluster. Safe to call from many tasks at once.

    `commit` writes a transaction to the store and notes its writes in the mirror; it raises `Stale` on a conflict.
    `hold` is entered while a transaction is in flight and, after a conflict, until the mirror has caught up: concurrent
    plans can then avoid what the transaction claims.
    """

    def __init__(
        self,
        *,
        cluster: Cluster,
        mirror: Mirror,
        commit: Callable[[Transaction], Awaitable[None]],
        hold: Callable[[Transaction], AbstractContextManager[None]] = _hold_nothing,
    ) -> None:
        self._cluster = cluster
        self._mirror = mirror
        self._commit = commit
        self._hold = hold
        # Only for plans that met a conflict: if all of them retried at once, each round would have one winner.
        self._retrying = asyncio.Lock()

    async def run(self, plan: Plan[R]) -> R:
        """Plan and commit; a plan without writes commits nothing. Errors of the plan and of the commit pass through."""
        with suppress(Stale):
            return await self._attempt(plan)
        async with self._retrying:
            return await retry_stale(partial(self._attempt, plan))

    async def _attempt(self, plan: Plan[R]) -> R:
        seen = self._mirror.revision
        result, transaction = plan(ReadSet(self._cluster, seen))
        if transaction.writes:
            with self._hold(transaction):
                try:
                    await self._commit(transaction)
                except Stale:
                    await self._catch_up(seen)
                    raise
        return result

    async def _catch_up(self, seen: Revision) -> None:
        """Wait until the mirror has the change that made a commit stale."""
        if self._mirror.revision == seen:
            # The change may be outside of the mirror's prefix and never arrive: then planning again is all we can do.
            with suppress(Unavailable):
                await self._mirror.wait_for(seen + 1, within=CATCH_UP_S)


def own_events(writes: Sequence[Write]) -> Iterator[Event]:
    """The events of our own commit, for `Mirror.note_own`. Deletions by prefix are left out: their keys are unknown."""
    for write in writes:
        if not isinstance(write, DeleteAll):
            yield Event(write.key, write.value if isinstance(write, Put) else None)
