"""The control plane: plans each change on the cluster in memory and commits it, with optimistic concurrency.

Each change is one commit. Plans are pure (`weft.domain.lifecycle.changes`). This module commits them under the
leader's fence and writes them through to the mirror, so that the next plan sees them. When a commit is stale, the
change is planned again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from weft.domain import kinds, model
from weft.domain.addresses import Address, parse_subnet_v4
from weft.domain.cluster import Cluster, Stored
from weft.domain.errors import Mismatch, NotFound, Unavailable
from weft.domain.ids import DEFAULT_NETWORK, DEFAULT_TENANT, GLOBAL_NAME, EndpointKey, NetworkKey
from weft.domain.ipam.address_cooldown import Cooldown
from weft.domain.ipam.allocator import NumberSet
from weft.domain.kinds import Kind
from weft.domain.lifecycle import changes
from weft.domain.lifecycle.changes import endpoints
from weft.domain.store_keys import AddressClaimKey, parse_store_key
from weft.domain.store_types import NEVER, Compare, Delete, DeleteAll, Put, RevisionEquals, Write
from weft.domain.transaction import ReadSet, Transaction
from weft.ports.store import Store
from weft.runtime.store.commit_loop import CommitLoop, Plan, own_events
from weft.runtime.store.mirror import Mirror

T = TypeVar("T", bound=model.Value)
R = TypeVar("R")

# Timeout of the watch event of our own commit.
CATCH_UP_LIMIT_S = 10.0
# Compared by every commit: the mirror may not have seen the restore mark yet.
_NO_RESTORE = RevisionEquals(kinds.RESTORE_KEY, NEVER)


@dataclass(frozen=True, slots=True)
class Condition:
    """Precondition on the changed object: its revision or existence (If-Match), or its absence (If-None-Match)."""

    revision: int | None = None
    absent: bool = False
    present: bool = False

    def check(self, stored: Stored[T] | None) -> None:
        if self.absent and stored is not None:
            raise Mismatch("the object exists, and If-None-Match requires that it does not")
        if self.present and stored is None:
            raise Mismatch("the object does not exist, and If-Match requires that it does")
        if self.revision is not None and (stored.revision if stored else NEVER) != self.revision:
            raise Mismatch(
                f"the object is at revision {stored.revision if stored else 'none'}, not {self.revision}: read it again"
            )


class ControlPlane:
    """All changes of the cluster by netmaster. Safe to call from many tasks at once."""

    def __init__(
        self,
        *,
        store: Store,
        cluster: Cluster,
        mirror: Mirror,
        fence: Callable[[], Compare],
        step_down: Callable[[], None],
    ) -> None:
        """Every commit compares the `fence`. `step_down` is called when the result of a commit is unknown. It must move
        the fence, so that a commit that is still in flight cannot succeed after later decisions."""
        self._store = store
        self.cluster = cluster
        self.mirror = mirror
        self._fence = fence
        self._step_down = step_down
        self._commits = CommitLoop(cluster=cluster, mirror=mirror, commit=self._commit, hold=self._hold_claims)
        # Addresses that commits in flight claim: concurrent plans must not pick the same ones.
        self._held: defaultdict[tuple[NetworkKey, int], NumberSet] = defaultdict(NumberSet)
        # Freed addresses are not reused at once: peers may still have them in their ARP caches and conntrack.
        self._cooldown = Cooldown()

    async def put(self, kind: Kind[T], value: T, condition: Condition) -> Stored[T]:
        """Create or change an object; returns what is stored."""

        def decide(reading: ReadSet) -> tuple[None, Transaction]:
            # Checked at each attempt: a concurrent change may have made the precondition false.
            condition.check(self.cluster.get(kind, *kind.key_parts(value)))
            return None, changes.plan_put(reading, kind, value)

        await self._carry_out(decide)
        # Read back, because the plan may have completed the object with allocated tags or addresses.
        stored = self.cluster.get(kind, *kind.key_parts(value))
        if stored is None:
            raise NotFound(f"{kind.name} {kind.key_text(value)!r} was deleted by someone else just now")
        return stored

    async def delete(self, kind: Kind[T], parts: Sequence[str], condition: Condition) -> None:
        """Delete an object and free what was allocated to it."""

        def decide(reading: ReadSet) -> tuple[None, Transaction]:
            condition.check(self.cluster.get(kind, *parts))
            return None, changes.plan_delete(reading, kind, *parts)

        await self._carry_out(decide)

    async def create_endpoint(self, wanted: model.Endpoint) -> model.Endpoint:
        """Create an endpoint and allocate its addresses; an existing one is returned unchanged."""
        return await self._carry_out(lambda reading: endpoints.plan_create(reading, wanted, busy=self._busy()))

    async def delete_endpoint(self, key: EndpointKey) -> model.Endpoint:
        """Delete an endpoint; returns it."""
        return await self._carry_out(lambda reading: endpoints.plan_delete(reading, key))

    async def update_endpoint(
        self, key: EndpointKey, *, labels: dict[str, str], container_id: str, container_name: str
    ) -> model.Endpoint:
        """Change labels, container id and container name of an endpoint; returns it."""
        return await self._carry_out(
            lambda reading: endpoints.plan_update(
                reading, key, labels=labels, container_id=container_id, container_name=container_name
            )
        )

    async def reserve_address(self, network: model.Network, group: model.Group | None, *, asked: str) -> Address:
        """Allocate an address before its endpoint exists."""
        return await self._carry_out(
            lambda reading: endpoints.plan_reserve(reading, network, group, asked=asked, busy=self._busy())
        )

    async def release_address(self, network: model.Network, text: str) -> None:
        """Free a reserved address."""
        await self._carry_out(lambda reading: (None, endpoints.plan_release(reading, network, text)))

    async def carry_out(self, decide: Callable[[ReadSet], Transaction]) -> None:
        """Any other change, such as the node GC's."""
        await self._carry_out(lambda reading: (None, decide(reading)))

    def _busy(self) -> endpoints.Busy:
        return endpoints.Busy(held=self._held, cooling=self._cooldown.active(asyncio.get_running_loop().time()))

    async def _carry_out(self, plan: Plan[R]) -> R:
        """Plan and commit, again after a conflict."""

        def plan_unless_restoring(reading: ReadSet) -> tuple[R, Transaction]:
            if self.cluster.restoring:
                raise Unavailable("a restore is running or was interrupted: wait for it, or restore again")
            return plan(reading)

        return await self._commits.run(plan_unless_restoring)

    async def _commit(self, transaction: Transaction) -> None:
        guards = (self._fence(), _NO_RESTORE)
        try:
            revision = await self._store.commit((*transaction.compares, *guards), transaction.writes)
        except Unavailable:
            # The commit may have happened: nothing else may be decided on the mirror before a new fence is held.
            self._step_down()
            raise
        await self._write_through(revision, transaction.writes)

    async def _write_through(self, revision: int, writes: Sequence[Write]) -> None:
        """Apply our own commit to the mirror at once, instead of waiting for its watch event."""
        for network, address in _claimed_addresses(writes, Delete):
            self._cooldown.add(network, address, now=asyncio.get_running_loop().time())
        # Only the watch reports which keys a prefix delete has removed.
        if any(isinstance(write, DeleteAll) for write in writes):
            await self.mirror.wait_for(revision, within=CATCH_UP_LIMIT_S)
        else:
            self.mirror.note_own(revision, own_events(writes))

    @contextmanager
    def _hold_claims(self, transaction: Transaction) -> Iterator[None]:
        """Keep concurrent plans from choosing the addresses that a commit in flight claims."""
        claimed = list(_claimed_addresses(transaction.writes, Put))
        for network, address in claimed:
            self._held[network, address.family].add(address.number)
        try:
            yield
        finally:
            for network, address in claimed:
                self._held[network, address.family].discard(address.number)


def _claimed_addresses(writes: Sequence[Write], kind: type[Put | Delete]) -> Iterator[tuple[NetworkKey, Address]]:
    """The addresses whose claims the writes put (or delete)."""
    for write in writes:
        if isinstance(write, kind) and isinstance(claim := parse_store_key(write.key), AddressClaimKey):
            yield claim.network, claim.address


async def bootstrap(control: ControlPlane, *, fwd_mode: model.FwdMode, encap: model.Encap, subnet: str) -> bool:
    """Create tenant `default`, its network and the global settings on the very first start; whether it did.

    Later starts change nothing: what an administrator has changed or deleted since stays so (W5).
    """
    cluster = control.cluster
    # The settings are written last and mark completion: a bootstrap that was interrupted is completed by the next.
    if cluster.exists(kinds.GLOBAL, GLOBAL_NAME):
        return False
    tenant = model.Tenant(name=DEFAULT_TENANT, default_network=DEFAULT_NETWORK if subnet else "")
    await control.put(kinds.TENANT, tenant, Condition())
    if subnet and cluster.get(kinds.NETWORK, DEFAULT_TENANT, DEFAULT_NETWORK) is None:
        gateway = Address(4, parse_subnet_v4(subnet).usable.first)
        network = model.Network(
            tenant=DEFAULT_TENANT, name=DEFAULT_NETWORK, encap=encap, subnet=subnet, gateway=str(gateway)
        )
        await control.put(kinds.NETWORK, network, Condition())
    await control.put(kinds.GLOBAL, model.Global(fwd_mode=fwd_mode), Condition())
    return True
