"""How a decision becomes a commit: what it read turns into compares, what it wants into writes.

A decision is taken on the cluster in memory and holds only if everything it looked at is still so when it is committed.
`ReadSet` keeps book of that, so no decision can forget a compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from weft.domain import codec, model
from weft.domain.cluster import Cluster, Stored
from weft.domain.errors import Invalid
from weft.domain.ids import StoreKey
from weft.domain.kinds import Kind
from weft.domain.store_types import NEVER, Compare, PrefixUnchangedSince, Put, Revision, RevisionEquals, Write

T = TypeVar("T", bound=model.Value)


@dataclass(frozen=True, slots=True)
class Transaction:
    """One commit. Empty of writes: everything is as asked already."""

    compares: tuple[Compare, ...] = ()
    writes: tuple[Write, ...] = ()


class ReadSet:
    """The cluster as one decision sees it. `revision` is up to where the cluster is known to be complete."""

    def __init__(self, cluster: Cluster, revision: Revision) -> None:
        self.cluster = cluster
        self._revision = revision
        self._seen: dict[StoreKey, Compare] = {}

    def get(self, kind: Kind[T], *parts: str) -> T | None:
        """An object, or None; either is compared at commit."""
        stored: Stored[T] | None = self.cluster.get(kind, *parts)
        self.at(kind.store_key(*parts), stored.revision if stored else NEVER)
        return stored.value if stored else None

    def require(self, kind: Kind[T], *parts: str, field: str) -> T:
        """An object that the input refers to; `Invalid` when it does not exist."""
        value = self.get(kind, *parts)
        if value is None:
            raise Invalid(f"{field}: {kind.name} {':'.join(parts)!r} does not exist: create it first", field=field)
        return value

    def all(self, kind: Kind[T], *lead: str) -> Iterator[T]:
        """Objects among which one may forbid the decision; none may appear or change before the commit."""
        self.quiet(kind.store_prefix(*lead))
        return self.cluster.all(kind, *lead)

    def at(self, key: StoreKey, revision: Revision) -> None:
        """Compare a key that was looked at in some other way."""
        self._seen[key] = RevisionEquals(key, revision)

    def quiet(self, prefix: StoreKey) -> None:
        """Compare a folder that was looked at in some other way."""
        self._seen[prefix] = PrefixUnchangedSince(prefix, self._revision)

    def plan(self, writes: list[Write]) -> Transaction:
        """The commit of this decision. Documents keep the members in them that only a newer Weft knows."""
        return Transaction(tuple(self._seen.values()), tuple(map(self._kept, writes)))

    def _kept(self, write: Write) -> Write:
        if not isinstance(write, Put) or write.key not in self.cluster.unknown:
            return write
        return Put(write.key, codec.with_unknown(write.value, self.cluster.unknown[write.key]), write.lease)


def put(kind: Kind[T], value: T) -> Put:
    """The write that stores an object."""
    return Put(kind.store_key(*kind.key_parts(value)), codec.encode(value))


def put_claim(key: StoreKey, holder: str) -> Put:
    """The write that takes an address, tag or id."""
    return Put(key, codec.encode(model.Claim(holder=holder)))


def holder_of(kind: Kind[T], value: T) -> str:
    """How a claim names its holder, such as `endpoint:default:blue:4f3a`."""
    return f"{kind.name}:{kind.key_text(value)}"
