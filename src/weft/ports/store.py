"""The Store port: a small ordered key-value store with compare-and-commit, watches and leases.

Contract for every adapter (`weft.testing.store_contract.StoreContract` tests it):

- **Revisions** are positive integers. A commit that writes gets a revision greater than all before it, also across
  restarts. All its writes share it, and no other commit has it (adapters may merge concurrent commits into one
  revision).
- **commit** is atomic: all compares hold and all writes happen, or `Stale` is raised and nothing happened. A commit
  without writes only checks. No key is written twice in one commit. When the response is lost, `Unavailable` is raised
  and the commit *may* have happened, or may still happen: callers make retries harmless, and where a late commit would
  do harm, it carries a fence (a compare that the caller makes false first). An expired lease is `NotFound`.
- **list** returns every key under a prefix, in key order, as of one revision. **watch** from that revision delivers
  every later change exactly once, in order, all keys of one revision together, also across reconnects. It raises
  `Compacted` when the history after that revision is gone.
- **Leases** expire when they are not kept alive within their time to live. The store then deletes the keys put with
  them, and watches see these deletions. A key that is put again takes the lease of its last put (or none).
- All calls are safe from concurrent tasks. Every call ends in bounded time, with `Unavailable` if necessary.
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
    "SharedStore",
    "Store",
    "StoreRoles",
    "Write",
]


class Store(Protocol):
    """See the module's contract. Opened and closed as an async context manager."""

    # Linearizable: a read sees every commit that was acknowledged before.
    async def read(self, key: StoreKey) -> Entry | None: ...

    async def list(self, prefix: StoreKey) -> Listing: ...

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        """The revision of the commit (the store's revision, if nothing was written)."""
        ...

    # Not async: adapters are async generators, which return at once.
    def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        """Changes after `since`, without end. Raises `Compacted` when `since` is too old."""
        ...

    async def grant(self, ttl: float) -> LeaseId:
        """A new lease of `ttl` seconds (stores may round up to whole seconds)."""
        ...

    async def keep_alive(self, lease: LeaseId) -> None:
        """Restart the time to live; `NotFound` when the lease has expired."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End the lease now and delete its keys; an expired lease is fine."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class StoreRoles(Protocol):
    """Users and roles of a store that programs use directly. Every call is idempotent."""

    async def put_role(self, name: str, *, writes: Sequence[StoreKey]) -> Sequence[str]:
        """Let a role read all of our keys and write exactly these; what has changed, for people.

        A key that is empty or ends with a slash stands for all keys below it.
        """
        ...

    async def has_user(self, name: str) -> bool: ...

    async def put_user(self, name: str, *, password: str, role: str) -> Sequence[str]:
        """Create a user if there is none, and grant it the role; what has changed. A user keeps its password."""
        ...


class SharedStore(Store, Protocol):
    """A store with users and roles of its own."""

    @property
    def roles(self) -> StoreRoles: ...
