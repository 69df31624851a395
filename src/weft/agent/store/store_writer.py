"""Commits this node's writes to the store: writes that are pending at the same time share one commit.

A write is planned on the cluster in memory, by a pure function that returns a result and a transaction. Transactions
that do not touch the same keys are merged into one commit. When that fails, each is planned and committed again, alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Denied, Invalid, Stale, Unavailable, WeftError
from weft.domain.store_types import NEVER, RevisionEquals
from weft.domain.transaction import ReadSet, Transaction
from weft.ports.store import Store
from weft.runtime.logs import Log
from weft.runtime.store.commit_loop import CommitLoop, Plan, TooManyConflicts, own_events
from weft.runtime.store.commit_merge import Commit, mergeable, merged
from weft.runtime.store.mirror import Mirror

log = Log("store-writer")

R = TypeVar("R")

# The limits of a shared commit: etcd accepts 128 operations and 1.5 MiB by default.
_MAX_OPERATIONS, _MAX_BYTES = 100, 1 << 19
# While a backup is being restored nothing may be written: the key of a restore must not exist.
_NO_RESTORE = RevisionEquals(kinds.RESTORE_KEY, NEVER)


class _PendingWrite(NamedTuple):
    """A write whose caller waits for the result."""

    plan: Plan[Any]
    done: asyncio.Future[Any]

    def resolve(self, result: object) -> None:
        if not self.done.done():  # else its caller was cancelled
            self.done.set_result(result)

    def reject(self, error: WeftError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class StoreWriter:
    """The queue of writes of one node. `run` commits them, for as long as one session with the store lasts."""

    def __init__(self, store: Store, *, cluster: Cluster, mirror: Mirror) -> None:
        self._store = store
        self._cluster = cluster
        self._mirror = mirror
        self._fence: RevisionEquals | None = None
        self._pending: list[_PendingWrite] = []
        self._has_pending = asyncio.Event()

    @property
    def connected(self) -> bool:
        """Whether writes are possible: a session with the store is established."""
        return self._fence is not None

    async def write(self, plan: Plan[R]) -> R:
        """Plan and commit, again while the state changes; `Unavailable` without a session.

        Once begun it is finished, also when the caller is cancelled.
        """
        if self._fence is None:
            raise Unavailable("this node is disconnected from the store: try again")
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._pending.append(_PendingWrite(plan, done))
        self._has_pending.set()
        return await done

    async def run(self, fence: RevisionEquals) -> None:
        """Commit what is pending. Every commit compares the fence, so that none succeeds after the session.

        Ends with `Unavailable` when the outcome of a commit is unknown: nothing may follow under the same fence.
        """
        self._fence = fence
        batch: Sequence[_PendingWrite] = ()
        try:
            while True:
                await self._has_pending.wait()
                self._has_pending.clear()
                batch, self._pending = self._pending, []
                await self._commit_batch(batch, fence)
        finally:
            self._fence = None
            for pending in (*batch, *self._pending):
                pending.reject(Unavailable("this node lost its connection to the store: try again"))
            self._pending = []

    async def _commit_batch(self, batch: Sequence[_PendingWrite], fence: RevisionEquals) -> None:
        if len(batch) > 1:
            await self._commit_merged(batch, fence)
        for pending in batch:
            if not pending.done.done():
                await self._commit_one(pending, fence)

    async def _commit_merged(self, batch: Sequence[_PendingWrite], fence: RevisionEquals) -> None:
        """One commit for as many writes as can be merged; the others stay pending."""
        planned: list[tuple[_PendingWrite, object, Commit]] = []
        for pending in batch:
            with suppress(WeftError):  # raised again, to its caller, when it is planned alone
                result, transaction = pending.plan(ReadSet(self._cluster, self._mirror.revision))
                planned.append((pending, result, Commit(transaction.compares, transaction.writes)))
        if not planned:
            return
        chosen = mergeable([commit for *_, commit in planned], operations=_MAX_OPERATIONS, size=_MAX_BYTES)
        together = [planned[position] for position in chosen]
        compares, writes = merged([commit for *_, commit in together])
        # Which of them the store rejects shows when each is committed alone.
        with suppress(Stale, Denied, Invalid):
            await self._commit(Transaction(tuple(compares), tuple(writes)), fence)
            for pending, result, _ in together:
                pending.resolve(result)

    async def _commit_one(self, pending: _PendingWrite, fence: RevisionEquals) -> None:
        def plan(reading: ReadSet) -> tuple[object, Transaction]:
            try:
                return pending.plan(reading)
            except WeftError as error:
                return error, Transaction()  # a value, because the same error of a commit means something else

        loop = CommitLoop(cluster=self._cluster, mirror=self._mirror, commit=partial(self._commit, fence=fence))
        try:
            result = await loop.run(plan)
        except Denied as error:
            # Refused for now, such as by a quota: the callers keep their records and try again.
            log.warning("write refused", reason=error.message)
            pending.reject(Unavailable(f"the store refused it: {error.message}"))
        except (Invalid, TooManyConflicts) as error:
            pending.reject(error)
        else:
            if isinstance(result, WeftError):
                pending.reject(result)
            else:
                pending.resolve(result)

    async def _commit(self, transaction: Transaction, fence: RevisionEquals) -> None:
        if transaction.writes:
            revision = await self._store.commit((*transaction.compares, fence, _NO_RESTORE), transaction.writes)
            # The next plan must see these writes; the watch brings them only after a round trip.
            self._mirror.note_own(revision, own_events(transaction.writes))
