"""How a node's decisions reach the store: those taken at the same time share one commit (ARCHITECTURE.md).

A decision looks at the cluster in memory and says what to write. Decisions that do not touch one another are committed
together; when that fails, or when they do touch, each is taken and committed anew, alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Denied, Invalid, Stale, Unavailable, WeftError
from weft.domain.store_types import NEVER, Event, RevisionEquals
from weft.domain.transaction import ReadSet, Transaction
from weft.ports.store import Store
from weft.runtime.store.commit_merge import Commit, mergeable, merged
from weft.runtime.store.mirror import Mirror

R = TypeVar("R")
Decide = Callable[[ReadSet], tuple[R, Transaction]]

TRIES = 20
CATCH_UP_S = 0.25
# What a shared commit may hold: etcd takes 128 operations by default.
_OPERATIONS, _SIZE = 100, 1 << 19
_NO_RESTORE = RevisionEquals(kinds.RESTORE_KEY, NEVER)


class _Asked(NamedTuple):
    """A decision that somebody waits for."""

    decide: Decide[Any]
    done: asyncio.Future[Any]

    def answer(self, result: object) -> None:
        if not self.done.done():  # else its asker has given up
            self.done.set_result(result)

    def refuse(self, error: WeftError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class StoreWriter:
    """What a node wants to write. `run` carries it out for as long as the node is in touch with the store."""

    def __init__(self, store: Store, *, cluster: Cluster, mirror: Mirror) -> None:
        self._store = store
        self._cluster = cluster
        self._mirror = mirror
        self._fence: RevisionEquals | None = None
        self._waiting: list[_Asked] = []
        self._news = asyncio.Event()

    @property
    def possible(self) -> bool:
        """Whether we are in touch."""
        return self._fence is not None

    async def carry_out(self, decide: Decide[R]) -> R:
        """Decide and commit, again while the state moves; `Unavailable` when we are not in touch with the store.

        Once begun it is finished, also when the caller gives up.
        """
        if self._fence is None:
            raise Unavailable("this node is cut off from the store: try again")
        done: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(decide, done))
        self._news.set()
        return await done

    async def run(self, fence: RevisionEquals) -> None:
        """Commit what is asked for, all of it with the fence.

        Ends with `Unavailable` when the outcome of a commit is unknown: nothing may follow under the same fence.
        """
        self._fence = fence
        group: Sequence[_Asked] = ()
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                group, self._waiting = self._waiting, []
                await self._carry_out_all(group, fence)
        finally:
            self._fence = None
            for asked in (*group, *self._waiting):
                asked.refuse(Unavailable("this node lost touch with the store: try again"))
            self._waiting = []

    async def _carry_out_all(self, group: Sequence[_Asked], fence: RevisionEquals) -> None:
        if len(group) > 1:
            await self._share(group, fence)
        for asked in group:
            if not asked.done.done():
                await self._carry_out(asked, fence)

    async def _share(self, group: Sequence[_Asked], fence: RevisionEquals) -> None:
        """One commit for as many as can be taken together; the others are left as they are."""
        decided: list[tuple[_Asked, object, Commit]] = []
        for asked in group:
            with suppress(WeftError):  # told when it is decided alone
                result, plan = asked.decide(ReadSet(self._cluster, self._mirror.revision))
                decided.append((asked, result, Commit(plan.compares, plan.writes)))
        if not decided:
            return
        chosen = mergeable([commit for *_, commit in decided], operations=_OPERATIONS, size=_SIZE)
        together = [decided[position] for position in chosen]
        compares, writes = merged([commit for *_, commit in together])
        with suppress(Stale, Denied, Invalid):  # whose fault it is shows when each is committed alone
            await self._commit(Transaction(tuple(compares), tuple(writes)), fence)
            for asked, result, _ in together:
                asked.answer(result)

    async def _carry_out(self, asked: _Asked, fence: RevisionEquals) -> None:
        for _ in range(TRIES):
            seen = self._mirror.revision
            try:
                result, plan = asked.decide(ReadSet(self._cluster, seen))
            except WeftError as error:
                asked.refuse(error)
                return
            try:
                await self._commit(plan, fence)
            except Stale:
                if self._mirror.revision == seen:
                    with suppress(Unavailable):
                        await self._mirror.wait_for(seen + 1, within=CATCH_UP_S)
            except (Denied, Invalid) as error:
                asked.refuse(error)
                return
            else:
                asked.answer(result)
                return
        asked.refuse(Unavailable("the state kept changing: try again"))

    async def _commit(self, plan: Transaction, fence: RevisionEquals) -> None:
        if plan.writes:
            revision = await self._store.commit((*plan.compares, fence, _NO_RESTORE), plan.writes)
            events = [Event(write.key, getattr(write, "value", None)) for write in plan.writes]  # type: ignore[union-attr]
            self._mirror.note_own(revision, events)
