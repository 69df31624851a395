"""Readiness of this node, including a check for staleness.

A watch that silently stops delivers nothing to notice. So the store is queried from time to time for its revision, by
an empty commit: that revision must be received and applied here within the limit.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from weft.agent.cni.attachments import Attachments
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.store.node_lease import NodeLease
from weft.domain.errors import Denied, Stale, Unavailable
from weft.domain.store_types import NEVER, PrefixUnchangedSince, Revision
from weft.ports.store import Store
from weft.runtime.backoff import Backoff
from weft.runtime.store.mirror import EVERYTHING, Mirror


class Readiness:
    """Readiness of one agent. `run` checks for staleness; `faults` may be called at any time."""

    def __init__(
        self,
        store: Store,
        *,
        mirror: Mirror,
        attachments: Attachments,
        lease: NodeLease,
        reconciler: Reconciler,
        limit: float,
    ) -> None:
        """`limit` is for how many seconds this node may be behind the store."""
        self._store = store
        self._mirror = mirror
        self._attachments = attachments
        self._lease = lease
        self._reconciler = reconciler
        self._limit = limit
        self._stale = ""
        # Why the node cannot be restored yet; empty if nothing is wrong.
        self.waiting_for = ""
        # A revision that the store had, and when it was queried.
        self._expected: tuple[Revision, float] = (NEVER, 0.0)

    def faults(self) -> list[str]:
        """Why this node is not ready; empty when it is."""
        found: list[str] = []
        if not self._attachments.ready.is_set():
            found.append(f"the node is not restored yet{self.waiting_for and f': {self.waiting_for}'}")
        # After --offline-limit netmaster may have given our blocks to others: allocating would duplicate addresses.
        elif not self._lease.may_allocate:
            found.append("store unreachable longer than --offline-limit: no addresses are allocated")
        if not self._lease.connected:
            refusal = self._lease.refusal
            found.append(f"the store refuses this node: {refusal}" if refusal else "the store is unreachable")
        if self._reconciler.fault:
            found.append(f"datapath out of sync: {self._reconciler.fault}")
        elif self._stale:
            found.append(self._stale)
        return found

    async def run(self) -> None:
        """Check until cancelled."""
        # Twice per limit, so that a stale node is noticed soon after it.
        pace = Backoff(first=self._limit / 2, cap=self._limit / 2)
        while True:
            await pace.pause()
            with suppress(Unavailable, Denied):  # an unreachable store is a fault of its own, and so is a refusal
                await self.check_staleness()

    async def check_staleness(self) -> None:
        """Compare our progress with the revision that the store had at an earlier check, and query the next one."""
        revision = await self._store.commit([], [])
        now = asyncio.get_running_loop().time()
        expected, since = self._expected
        if min(self._mirror.revision, self._reconciler.applied_revision) >= expected:
            self._stale = ""
            self._expected = (revision, now)
        elif now - since < self._limit:
            pass  # it may still arrive
        elif self._mirror.revision >= expected:
            self._stale = f"changes of the store have not been applied for {self._limit:g} s"
        elif await self._has_missed_events():
            self._stale = f"the store watch has delivered nothing for {self._limit:g} s"
        else:
            self._expected = (revision, now)

    async def _has_missed_events(self) -> bool:
        """Whether one of our keys is newer than our watch. An etcd that others use too counts their writes as well."""
        try:
            await self._store.commit([PrefixUnchangedSince(EVERYTHING, self._mirror.revision)], [])
        except Stale:
            return True
        return False
