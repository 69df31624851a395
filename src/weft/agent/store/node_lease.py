"""The node's lease and its session with the store (ADR 2).

- The node announces itself by a leased key, written together with its document. Every commit of the node compares that
  very key, so none succeeds once the lease has ended, and node GC takes nothing back before it has ended.
- A commit of unknown outcome ends the session. The next session writes the key again before it commits anything else,
  which fences off whatever is still in flight; what the store says then is certain.
- Contact counts from before the last answered keep-alive was sent. When that is longer ago than the offline limit, node
  GC may free the node's addresses, so the node allocates none and treats none as its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from weft.agent.store.store_writer import StoreWriter
from weft.domain import kinds, model
from weft.domain.errors import Conflict, Denied, Invalid, NotFound, Stale, Unavailable
from weft.domain.ids import NodeName
from weft.domain.store_types import NEVER, Put, RevisionEquals
from weft.domain.transaction import put
from weft.ports.store import LeaseId, Store
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log
from weft.runtime.store.lease_keepalive import boottime
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

log = Log("node-lease")

# The key of a restore under way must not exist: a backup is being written over everything.
_NO_RESTORE = RevisionEquals(kinds.RESTORE_KEY, NEVER)


class Session(Protocol):
    """The work that a session does, once per connection to the store."""

    def resync(self) -> None:
        """Compare records with the store. Called when the mirror has caught up, before the node commits anything."""
        ...

    async def run(self) -> None:
        """Work until cancelled. `Unavailable`, `NotFound` and `Stale` end the session, and another begins."""
        ...


class NodeLease:
    """Keeps this node's lease in the store. `run` does the work; the mirror and its cluster are run by someone else."""

    def __init__(
        self,
        store: Store,
        *,
        node: model.Node,
        mirror: Mirror,
        writer: StoreWriter,
        ttl: float,
        limit: float,
        clock: Callable[[], float] = boottime,
    ) -> None:
        """`ttl` is the lease's; `limit` is for how many seconds the node may allocate addresses without the store.

        `clock` must not stop while the machine is suspended: node GC goes on counting.
        """
        self._store = store
        self._document = node
        self._mirror = mirror
        self._writer = writer
        self._ttl = ttl
        self._limit = limit
        self._clock = clock
        # Times of that clock.
        self._last_contact = self._allocate_until = float("-inf")
        # Why the store refused the last session; empty unless it did.
        self.refusal = ""

    @property
    def node(self) -> NodeName:
        return self._document.name

    @property
    def connected(self) -> bool:
        """Whether a session is established: lease granted, mirror caught up, commits possible."""
        return self._writer.connected

    @property
    def may_allocate(self) -> bool:
        """Whether addresses may be allocated: the last contact with the store is within the offline limit."""
        return self._clock() < self._allocate_until

    def check_may_allocate(self) -> None:
        """`Unavailable` beyond the offline limit."""
        if not self.may_allocate:
            raise Unavailable(f"node {self.node}: store unreachable longer than --offline-limit")

    async def run(self, session: Session) -> None:
        """Hold one session after the other, until cancelled.

        A refusal, such as of a document that an older netmaster cannot read, ends nothing: whoever can cure it is not
        here, and the ports of this node need its agent.
        """
        backoff = Backoff()
        while True:
            try:
                await self._session(session)
            except (Unavailable, NotFound, Stale):
                self.refusal = ""
            except (Denied, Invalid, Conflict) as error:
                if self.refusal != error.message:  # it is retried every other second: one line is enough
                    log.error("the store refuses this node, retrying", node=self.node, reason=error.message)
                self.refusal = error.message
            await backoff.pause()

    async def _session(self, session: Session) -> None:
        # Taken before the grant is sent: the lease may be as old as that.
        self._last_contact = self._clock()
        lease = await self._store.grant(self._ttl)
        key = kinds.alive_node(self.node)
        present = await self._store.read(key)
        unchanged = RevisionEquals(key, present.revision if present else NEVER)
        writes = [put(kinds.NODE, self._document), Put(key, b"{}", lease)]
        revision = await self._store.commit([unchanged, _NO_RESTORE], writes)
        async with background(self._keep_alive(lease), name=f"lease of {self.node}"):
            # From this revision on nothing of an earlier session can be committed, so what the mirror has is certain.
            await self._mirror.wait_for(revision, within=self._ttl)
            session.resync()
            fence = RevisionEquals(key, revision)
            async with background(self._writer.run(fence), name=f"store writer of {self.node}"):
                self._allocate_until = self._last_contact + self._limit
                self.refusal = ""
                await session.run()

    async def _keep_alive(self, lease: LeaseId) -> None:
        # A third of the TTL: one lost keep-alive does not cost the lease.
        pace = Backoff(first=self._ttl / 3, cap=self._ttl / 3)
        while True:
            await pace.pause()
            sent = self._clock()
            await self._store.keep_alive(lease)
            self._last_contact = sent
            if self.connected:
                self._allocate_until = sent + self._limit
