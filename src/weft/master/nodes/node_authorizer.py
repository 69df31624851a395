"""Authorizes a node's writes to the store: a node reads everything, and writes only what it owns.

This is netmaster's counterpart of Kubernetes' node authorizer: a compromised node must not change other nodes' state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from weft.domain.errors import Denied, NotFound, Stale
from weft.domain.ids import NodeName, StoreKey
from weft.domain.lifecycle.node_permissions import check_ownership, missing_keys
from weft.domain.store_types import NEVER, Compare, LeaseId, Put, Revision, RevisionEquals, Write
from weft.master.nodes.node_quota import LEASE_OWNERS, NodeQuotas
from weft.ports.store import Entry, Store
from weft.runtime.store.commit_loop import retry_stale

# Attempts of a commit whose authorization became stale; more would keep a slow node busy for nothing.
_TRIES = 4


def lease_key(lease: LeaseId) -> StoreKey:
    """The key that names the owner of a lease. It is put with that lease, so that it expires together with it.

    It is in the store, because a node may keep its lease alive through any master.
    """
    return StoreKey(f"{LEASE_OWNERS}{lease:x}")


class NodeAuthorizer:
    """The writing half of `ports.store` for one node; `Denied` for keys and leases that it does not own."""

    def __init__(self, store: Store, node: NodeName, *, quotas: NodeQuotas | None = None) -> None:
        self._store = store
        self._node = node
        self._quotas = quotas

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if self._quotas is not None:
            self._quotas.check(self._node, writes)
        for lease in {write.lease for write in writes if isinstance(write, Put) and write.lease is not None}:
            await self._check_lease(lease)
        seen = await self._check_ownership(compares, writes)

        async def attempt() -> Revision:
            # The values that the authorization depends on are compared too, so that it still holds at the commit.
            return await self._store.commit([*compares, *seen], writes)

        async def check_again(conflict: Stale) -> None:
            nonlocal seen
            before, seen = seen, await self._check_ownership(compares, writes)
            if seen == before:
                raise conflict  # one of the node's own compares failed

        # `Stale`, not `Unavailable`: nothing was written, and the node has a commit loop of its own.
        return await retry_stale(attempt, catch_up=check_again, tries=_TRIES, exhausted=Stale)

    async def grant(self, ttl: float) -> LeaseId:
        if self._quotas is not None:
            self._quotas.check_lease(self._node)
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
            return  # expired already
        await self._store.revoke(lease)

    async def _check_lease(self, lease: LeaseId) -> None:
        owner = await self._store.read(lease_key(lease))
        if owner is None:
            raise NotFound(f"lease {lease} has expired")
        if owner.value != self._node.encode():
            raise Denied(f"lease {lease} does not belong to node {self._node}")

    async def _check_ownership(self, compares: Sequence[Compare], writes: Sequence[Write]) -> list[RevisionEquals]:
        """Check the writes against the current values; returns compares of the values that were read.

        A node that decided on older values is `Stale`, not `Denied`: what was free then may have another owner by now.
        """
        found: dict[StoreKey, Entry | None] = {}
        # Keys that the node compares as absent need no read: its commit fails unless they are.
        values: dict[StoreKey, bytes | None] = {
            compare.key: None
            for compare in compares
            if isinstance(compare, RevisionEquals) and compare.revision == NEVER
        }
        while needed := sorted(missing_keys(writes, values)):
            for key, entry in zip(needed, await asyncio.gather(*map(self._store.read, needed)), strict=True):
                found[key] = entry
                values[key] = None if entry is None else entry.value
        seen = [RevisionEquals(key, NEVER if entry is None else entry.revision) for key, entry in found.items()]
        if any(
            compare.key in found and compare not in seen for compare in compares if isinstance(compare, RevisionEquals)
        ):
            raise Stale("a compared key has changed")
        check_ownership(self._node, writes, values)
        return seen
