"""Writes this node's sync status to the store (ADR 8): after a sync request, and when its readiness changes.

Nothing is written otherwise, so an idle cluster costs the store nothing. A status is not a sync request: it triggers no
other. Several requests that come together get one acknowledgement, that of the last.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.agent.dataplane.reconciler import Reconciler
from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import WeftError
from weft.domain.ids import NodeName
from weft.domain.store_types import Event, Put
from weft.ports.store import Store
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.logs import Log
from weft.runtime.store.mirror import Mirror

log = Log("sync-status")

# How often readiness is compared with what the store has.
CHECK_S = 0.5
# The least time between two writes: under load many requests share one.
PACE_S = 0.05
# Masters refuse a longer status, and texts that cannot be printed.
MAX_FAULTS, MAX_FAULT_TEXT = 20, 500


class SyncStatusReporter:
    """Reports the sync status of one node."""

    def __init__(
        self,
        store: Store,
        *,
        node: NodeName,
        cluster: Cluster,
        mirror: Mirror,
        reconciler: Reconciler,
        faults: Callable[[], list[str] | None],
    ) -> None:
        """`faults` returns why the node is not ready, or None while the store is unreachable."""
        self._store = store
        self._node = node
        self._cluster = cluster
        self._mirror = mirror
        self._reconciler = reconciler
        self._faults = faults

    async def run(self) -> None:
        """Report until cancelled."""
        pace, backoff = Backoff(first=PACE_S, cap=PACE_S), Backoff()
        due = self._reconciler.sync_ack_due
        while True:
            await wait_event(due, within=CHECK_S)
            due.clear()
            # None while disconnected: the write would fail, and the status is compared again after the reconnect.
            faults = self._faults()
            status = model.SyncStatus(
                revision=self._reconciler.acked_revision, faults=tuple(map(_shown, (faults or ())[:MAX_FAULTS]))
            )
            if faults is None or status == self._cluster.sync_statuses.get(self._node):
                continue
            try:
                await self._write(status)
                backoff.reset()
                await pace.pause()
            except WeftError as error:
                log.warning("writing sync status failed", reason=error.message)
                await backoff.pause()
                due.set()

    async def _write(self, status: model.SyncStatus) -> None:
        put = Put(kinds.applied_key(self._node), codec.encode(status))
        revision = await self._store.commit([], [put])
        # At once, not with the watch: the next comparison must see it, or it would write the same again.
        self._mirror.note_own(revision, [Event(put.key, put.value)])


def _shown(fault: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in fault[:MAX_FAULT_TEXT])
