"""Tells the store how far this node has come (ADR 8): when a wish asks for it, and when its readiness changes.

Nothing is written while nobody asks and nothing is wrong. A receipt is no wish, so it never leads to another. Many
wishes that come together get one receipt, that of the last.
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

log = Log("receipts")

# How often readiness is looked at; that costs the store nothing.
LOOK_S = 0.5
# How soon after a receipt the next one may follow.
PACE_S = 0.05


class Receipts:
    """The receipts of one node."""

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
        """`faults` are why the node is not ready, or None while it cannot tell anyone."""
        self._store = store
        self._node = node
        self._cluster = cluster
        self._mirror = mirror
        self._reconciler = reconciler
        self._faults = faults

    async def run(self) -> None:
        """Tell for ever whatever the store does not hold yet."""
        pace, backoff = Backoff(first=PACE_S, cap=PACE_S), Backoff()
        due = self._reconciler.receipt_due
        while True:
            await wait_event(due, within=LOOK_S)
            due.clear()
            faults = self._faults()
            receipt = model.Receipt(revision=self._reconciler.settled, faults=tuple(faults or ()))
            if faults is None or receipt == self._cluster.receipts.get(self._node):
                continue
            try:
                await self._tell(receipt)
                backoff.reset()
                await pace.pause()
            except WeftError as error:
                log.warning("receipt not written", reason=error.message)
                await backoff.pause()
                due.set()

    async def _tell(self, receipt: model.Receipt) -> None:
        put = Put(kinds.receipt_of(self._node), codec.encode(receipt))
        revision = await self._store.commit([], [put])
        self._mirror.note_own(revision, [Event(put.key, put.value)])
