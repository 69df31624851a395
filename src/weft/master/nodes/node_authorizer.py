"""The store as one node may use it: it reads everything, and writes only what is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from weft.domain.errors import Denied, NotFound, Stale
from weft.domain.ids import NodeName, StoreKey
from weft.domain.kinds import ALIVE
from weft.domain.lifecycle.node_permissions import check_ownership, still_needed
from weft.domain.store_types import NEVER, Compare, LeaseId, Put, Revision, RevisionEquals, Write
from weft.ports.store import Entry, Store

_TRIES = 4


def lease_key(lease: LeaseId) -> StoreKey:
    """Where it is written to which node a lease was granted; leased itself, so it goes with the lease.

    In the store, because a node keeps its lease alive through whichever master it reaches.
    """
    return StoreKey(f"{ALIVE}/leases/{lease:x}")


class NodeStore:
    """The writing half of `ports.store` for one node; `Denied` where it would touch what is not its own."""

    def __init__(self, store: Store, node: NodeName) -> None:
        self._store = store
        self._node = node

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        for lease in {write.lease for write in writes if isinstance(write, Put) and write.lease is not None}:
            await self._check_lease(lease)
        seen = await self._check_ownership(compares, writes)
        for _ in range(_TRIES):
            try:
                # What the verdict rests on is compared too, so it holds at the moment of the commit.
                return await self._store.commit([*compares, *seen], writes)
            except Stale:
                before, seen = seen, await self._check_ownership(compares, writes)
                if seen == before:
                    raise  # it is the node's own compare that does not hold
        raise Stale("what is to be written changes too fast")

    async def grant(self, ttl: float) -> LeaseId:
        lease = await self._store.grant(ttl)
        await self._store.commit([], [Put(lease_key(lease), self._node.encode(), lease)])
        return lease

    async def keep_alive(self, lease: LeaseId) -> None:
        await self._check_lease(lease)
        await self._store.keep_alive(lease)

    async def revoke(self, lease: LeaseId) -> None:
        try:
            await self._check_lease(lease)
        except NotFound:
            return  # ended already
        await self._store.revoke(lease)

    async def _check_lease(self, lease: LeaseId) -> None:
        owner = await self._store.read(lease_key(lease))
        if owner is None:
            raise NotFound(f"lease {lease} has ended")
        if owner.value != self._node.encode():
            raise Denied(f"lease {lease} is not node {self._node}'s own")

    async def _check_ownership(self, compares: Sequence[Compare], writes: Sequence[Write]) -> list[RevisionEquals]:
        """Judge the writes by the present values; what was looked at, as compares.

        A node that decided by older values is `Stale`, not `Denied`: what was free then may be another's by now.
        """
        found: dict[StoreKey, Entry | None] = {}
        # What the node itself says is absent is not looked at: its commit holds only if it is.
        values: dict[StoreKey, bytes | None] = {
            compare.key: None
            for compare in compares
            if isinstance(compare, RevisionEquals) and compare.revision == NEVER
        }
        while needed := sorted(still_needed(writes, values)):
            for key, entry in zip(needed, await asyncio.gather(*map(self._store.read, needed)), strict=True):
                found[key] = entry
                values[key] = None if entry is None else entry.value
        seen = [RevisionEquals(key, NEVER if entry is None else entry.revision) for key, entry in found.items()]
        if any(
            compare.key in found and compare not in seen for compare in compares if isinstance(compare, RevisionEquals)
        ):
            raise Stale("what is to be written has changed")
        check_ownership(self._node, writes, values)
        return seen
