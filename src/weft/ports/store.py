"""The Store port: a small ordered key-value store with compare-and-commit, watches and leases.

Contract, for every adapter (`weft.testing.store_contract.StoreContract` is the judge):

- **Revisions** are positive integers. A commit that writes gets one that is greater than all before it, also over
  restarts; all its writes share it, and nothing else has it (adapters may merge commits that were asked for at the same
  time into one revision).
- **commit** is atomic: all compares hold and all writes happen, or `Stale` is raised and nothing happened. A commit
  with no writes only checks. No key is written twice in one commit. When the answer was lost, `Unavailable` is raised
  and the commit *may* have happened, or may still happen: callers write so that trying again is harmless, and where a
  late commit would harm, it carries a compare that is made false first. A lease that has ended is `NotFound`.
- **list** gives every key under a prefix, in key order, as of one revision; **watch** from that revision gives every
  later change exactly once, in order, all keys of one revision together, over reconnects too. When history is gone:
  `Compacted`.
- **leases** end when they are not kept alive for their time to live; keys put with a lease are then deleted by the
  store, which watches see. A key that is put again takes the lease of its last put (or none).
- Everything is safe to call at once from many tasks; every call ends in bounded time, with `Unavailable` if it must.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Protocol, Self

from weft.domain.ids import StoreKey
from weft.domain.store_types import (
    NEVER,
    Change,
    Compare,
    Delete,
    DeleteAll,
    Entry,
    Event,
    LeaseId,
    Listing,
    PrefixUnchangedSince,
    Put,
    Revision,
    RevisionEquals,
    Write,
)

__all__ = [
    "NEVER",
    "Change",
    "Compare",
    "Delete",
    "DeleteAll",
    "Entry",
    "Event",
    "LeaseId",
    "Listing",
    "PrefixUnchangedSince",
    "Put",
    "Revision",
    "RevisionEquals",
    "Store",
    "Write",
]


class Store(Protocol):
    """See the module's contract. Opened and closed as an async context manager."""

    async def read(self, key: StoreKey) -> Entry | None: ...

    async def list(self, prefix: StoreKey) -> Listing: ...

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        """The revision of the commit (of the store, where nothing was written)."""
        ...

    def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        """Changes after `since`; goes on for ever. Raises `Compacted` when `since` is too old."""
        ...

    async def grant(self, ttl: float) -> LeaseId:
        """A new lease of `ttl` seconds (stores may round up to whole seconds)."""
        ...

    async def keep_alive(self, lease: LeaseId) -> None:
        """Start the lease's time anew; `NotFound` when it has ended."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End the lease now and delete its keys; ended already is fine."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
