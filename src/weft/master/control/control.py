"""The control plane's use cases: decide on the cluster in memory, commit, and decide again when the state moved.

Each is one commit. A decision is pure (`weft.domain.lifecycle.changes`); here it is carried out, fenced by the leadership, and
written through to the snapshot, so that the next decision sees it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from weft.domain import kinds, model
from weft.domain.addresses import Address, address_from_hex
from weft.domain.cluster import Cluster, Stored
from weft.domain.errors import Mismatch, NotFound, Stale, Unavailable
from weft.domain.ids import EndpointKey, NetworkKey, NetworkName, TenantName
from weft.domain.ipam.address_cooldown import Cooldown
from weft.domain.ipam.allocator import NumberSet
from weft.domain.kinds import Kind
from weft.domain.lifecycle import changes
from weft.domain.lifecycle.changes import endpoints
from weft.domain.store_types import NEVER, Compare, Delete, DeleteAll, Event, Put, Revision, RevisionEquals, Write
from weft.domain.transaction import ReadSet, Transaction
from weft.ports.store import Store
from weft.runtime.store.mirror import Mirror

T = TypeVar("T", bound=model.Value)
R = TypeVar("R")

TRIES = 20
# How long to wait for news of what made a commit stale before trying anyway.
CATCH_UP_S = 0.25
# How long our own commit may take to come back to us.
CATCH_UP_LIMIT_S = 10.0
ADDRESS_CLAIMS = f"{kinds.CLAIMS}/addresses/"
_NO_RESTORE = RevisionEquals(kinds.RESTORE_KEY, NEVER)


@dataclass(frozen=True, slots=True)
class Condition:
    """What the caller demands of the object it changes: a revision (If-Match) or its absence (If-None-Match)."""

    revision: int | None = None
    absent: bool = False
    present: bool = False

    def check(self, stored: Stored[T] | None) -> None:
        if self.absent and stored is not None:
            raise Mismatch("the object exists, and If-None-Match asks that it does not")
        if self.present and stored is None:
            raise Mismatch("the object does not exist, and If-Match asks that it does")
        if self.revision is not None and (stored.revision if stored else NEVER) != self.revision:
            raise Mismatch(
                f"the object is at revision {stored.revision if stored else 'none'}, not {self.revision}: read it again"
            )


class ControlPlane:
    """All changes of the cluster go through here. Safe to call from many tasks at once."""

    def __init__(
        self,
        *,
        store: Store,
        cluster: Cluster,
        mirror: Mirror,
        fence: Callable[[], Compare],
        mark_dirty: Callable[[], None],
    ) -> None:
        """Every commit compares the `fence`. `mark_dirty` is called when the outcome of one is unknown, and must move the
        fence: what may still be on its way then cannot happen after whatever is decided next."""
        self._store = store
        self.cluster = cluster
        self.mirror = mirror
        self._fence = fence
        self._doubt = mark_dirty
        self._turns = asyncio.Lock()
        self._held: defaultdict[tuple[NetworkKey, int], NumberSet] = defaultdict(NumberSet)
        self._resting = Cooldown()

    async def put(self, kind: Kind[T], value: T, condition: Condition) -> Stored[T]:
        """Create or change an object; what is stored then."""

        def decide(reading: ReadSet) -> tuple[None, Transaction]:
            condition.check(self.cluster.get(kind, *kind.key_parts(value)))
            return None, changes.plan_put(reading, kind, value)

        await self._carry_out(decide)
        stored = self.cluster.get(kind, *kind.key_parts(value))
        if stored is None:
            raise NotFound(f"{kind.name} {kind.key_text(value)!r} was deleted by someone else just now")
        return stored

    async def delete(self, kind: Kind[T], parts: Sequence[str], condition: Condition) -> None:
        """Delete an object with all that was given to it."""

        def decide(reading: ReadSet) -> tuple[None, Transaction]:
            condition.check(self.cluster.get(kind, *parts))
            return None, changes.plan_delete(reading, kind, *parts)

        await self._carry_out(decide)

    async def create_endpoint(self, wanted: model.Endpoint) -> model.Endpoint:
        """An endpoint with its addresses; one that exists is given back unchanged."""
        return await self._carry_out(lambda reading: endpoints.plan_create(reading, wanted, busy=self._busy()))

    async def delete_endpoint(self, key: EndpointKey) -> model.Endpoint:
        """The endpoint that was deleted."""
        return await self._carry_out(lambda reading: endpoints.plan_delete(reading, key))

    async def update_endpoint(
        self, key: EndpointKey, *, labels: dict[str, str], container_id: str, container_name: str
    ) -> model.Endpoint:
        """The endpoint with other labels, container id and name."""
        return await self._carry_out(
            lambda reading: endpoints.plan_update(
                reading, key, labels=labels, container_id=container_id, container_name=container_name
            )
        )

    async def reserve_address(self, network: model.Network, group: model.Group | None, *, asked: str) -> Address:
        """An address ahead of its endpoint."""
        return await self._carry_out(
            lambda reading: endpoints.plan_reserve(reading, network, group, asked=asked, busy=self._busy())
        )

    async def release_address(self, network: model.Network, text: str) -> None:
        """Give back an address that was reserved."""
        await self._carry_out(lambda reading: (None, endpoints.plan_release(reading, network, text)))

    async def carry_out(self, decide: Callable[[ReadSet], Transaction]) -> None:
        """Any other decision, such as the collector's."""
        await self._carry_out(lambda reading: (None, decide(reading)))

    def _busy(self) -> endpoints.Busy:
        return endpoints.Busy(held=self._held, resting=self._resting.at(asyncio.get_running_loop().time()))

    async def _carry_out(self, decide: Callable[[ReadSet], tuple[R, Transaction]]) -> R:
        """Decide and commit. Whoever met another at it takes turns from then on, so that many at once all succeed."""
        with suppress(Stale):
            return await self._try_once(decide)
        async with self._turns:
            for _ in range(TRIES):
                with suppress(Stale):
                    return await self._try_once(decide)
        raise Unavailable("the state kept changing under this request: try again")

    async def _try_once(self, decide: Callable[[ReadSet], tuple[R, Transaction]]) -> R:
        """`Stale` when the state moved; the news of it has come then, or will not come soon."""
        if self.cluster.restoring:
            raise Unavailable("a restore is under way or was interrupted: wait for it, or restore again")
        seen = self.mirror.revision
        result, plan = decide(ReadSet(self.cluster, seen))
        if not plan.writes:
            return result
        claimed = list(_claimed_addresses(plan.writes, Put))
        self._hold(claimed)
        try:
            await self._write_through(await self._commit(plan), plan.writes)
        except Stale:
            await self._catch_up(seen)
            raise
        finally:
            self._let_go(claimed)
        return result

    async def _commit(self, plan: Transaction) -> Revision:
        guards = (self._fence(), _NO_RESTORE)
        try:
            return await self._store.commit((*plan.compares, *guards), plan.writes)
        except Unavailable:
            self._doubt()
            raise

    async def _write_through(self, revision: int, writes: Sequence[Write]) -> None:
        """Bring our own commit into the snapshot, at once where the writes say all that happened."""
        for network, address in _claimed_addresses(writes, Delete):
            self._resting.rest(network, address, now=asyncio.get_running_loop().time())
        if any(isinstance(write, DeleteAll) for write in writes):
            await self.mirror.wait_for(revision, within=CATCH_UP_LIMIT_S)
            return
        events = [Event(write.key, write.value if isinstance(write, Put) else None) for write in writes]  # type: ignore[union-attr]
        self.mirror.note_own(revision, events)

    async def _catch_up(self, seen: int) -> None:
        if self.mirror.revision == seen:
            with suppress(
                Unavailable
            ):  # news of other folders may never come to us: then trying again is all we can do
                await self.mirror.wait_for(seen + 1, within=CATCH_UP_S)

    def _hold(self, claimed: list[tuple[NetworkKey, Address]]) -> None:
        for network, address in claimed:
            self._held[network, address.family].add(address.number)

    def _let_go(self, claimed: list[tuple[NetworkKey, Address]]) -> None:
        for network, address in claimed:
            self._held[network, address.family].discard(address.number)


def _claimed_addresses(writes: Sequence[Write], kind: type[Put | Delete]) -> Iterator[tuple[NetworkKey, Address]]:
    """The addresses whose claims a commit puts (or deletes)."""
    for write in writes:
        if isinstance(write, kind) and write.key.startswith(ADDRESS_CLAIMS):
            _, _, tenant, network, number = write.key.split("/")
            yield NetworkKey(TenantName(tenant), NetworkName(network)), address_from_hex(number)
