"""Whether this node is ready, or why not; and whether it still knows what the store knows.

News that stops coming is not seen by waiting for it. So the store is asked now and then how far it is, by a commit that
writes nothing: what it had then must be known and carried out here within the limit.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weft.agent.cni.attachments import Attachments
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.store.node_ipam import NodeIpam
from weft.domain.errors import Stale, Unavailable
from weft.domain.store_types import NEVER, PrefixUnchangedSince, Revision
from weft.ports.store import Store
from weft.runtime.backoff import Backoff
from weft.runtime.store.mirror import EVERYTHING, Mirror


class Readiness:
    """The judge of one agent. `run` watches for staleness; `faults` may be asked at any time."""

    def __init__(
        self,
        store: Store,
        *,
        mirror: Mirror,
        attachments: Attachments,
        holdings: NodeIpam,
        reconciler: Reconciler,
        limit: float,
    ) -> None:
        """`limit` is for how many seconds this node may be behind the store."""
        self._store = store
        self._mirror = mirror
        self._attachments = attachments
        self._holdings = holdings
        self._reconciler = reconciler
        self._limit = limit
        self._stale = ""
        # How far the store was when it was asked, and when that was.
        self._owed: tuple[Revision, float] = (NEVER, 0.0)

    def faults(self) -> list[str]:
        """Why this node is not ready; nothing when it is."""
        found: list[str] = []
        if not self._attachments.ready.is_set():
            found.append("the node is not restored yet")
        elif not self._holdings.may_allocate:
            found.append("this node has been cut off from the store for too long: no addresses are given out")
        if not self._holdings.connected:
            found.append("the store is away")
        if self._reconciler.fault:
            found.append(f"the datapath does not follow: {self._reconciler.fault}")
        elif self._stale:
            found.append(self._stale)
        return found

    async def run(self) -> None:
        """Look for ever."""
        pace = Backoff(first=self._limit / 2, cap=self._limit / 2)
        while True:
            await pace.pause()
            with suppress(Unavailable):  # a store that is away is a fault of its own
                await self.look()

    async def look(self) -> None:
        """Ask the store how far it is, and judge what it had when it was asked before."""
        revision = await self._store.commit([], [])
        now = asyncio.get_running_loop().time()
        owed, since = self._owed
        if min(self._mirror.revision, self._reconciler.realised) >= owed:
            self._stale = ""
            self._owed = (revision, now)
        elif now - since < self._limit:
            pass  # it may still come
        elif self._mirror.revision >= owed:
            self._stale = f"what the store says has not been carried out for {self._limit:g} s"
        elif await self._has_missed():
            self._stale = f"the store's news has not come for {self._limit:g} s"
        else:
            self._owed = (revision, now)

    async def _has_missed(self) -> bool:
        """Whether the store has anything newer than our news; it may also count what is none of ours."""
        try:
            await self._store.commit([PrefixUnchangedSince(EVERYTHING, self._mirror.revision)], [])
        except Stale:
            return True
        return False
