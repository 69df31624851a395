"""From a decision to a commit: what it read becomes compares, what it changes becomes writes.

A decision is made on the cluster in memory. Its commit succeeds only if everything that the decision read is unchanged.
`ReadSet` records the reads, so that no decision can forget a compare.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from weft.domain import codec, model
from weft.domain.cluster import Cluster, Stored
from weft.domain.errors import Invalid, Unavailable
from weft.domain.ids import StoreKey
from weft.domain.kinds import Kind
from weft.domain.store_types import NEVER, Compare, PrefixUnchangedSince, Put, Revision, RevisionEquals, Write

T = TypeVar("T", bound=model.Value)


@dataclass(frozen=True, slots=True)
class Transaction:
    """One commit. Without writes the present state is the desired one."""

    compares: tuple[Compare, ...] = ()
    writes: tuple[Write, ...] = ()


class ReadSet:
    """The cluster as one decision reads it. Up to `revision` the cluster in memory is complete."""

    def __init__(self, cluster: Cluster, revision: Revision) -> None:
        self.cluster = cluster
        self._revision = revision
        # By key: a decision may read an object several times, and stores limit the compares of a commit.
        self._seen: dict[StoreKey, Compare] = {}

    def get(self, kind: Kind[T], *parts: str) -> T | None:
        """An object, or None; its revision or absence is compared at commit."""
        # Absence is a read too: a concurrent creation must fail the commit.
        stored: Stored[T] | None = self.cluster.get(kind, *parts)
        key = kind.store_key(*parts)
        revision = stored.revision if stored else NEVER
        # An unreadable document is absent for the decision, but its key exists: the commit may replace the garbage.
        if fault := self.cluster.faults.get(key):
            if fault.newer:
                raise Unavailable(f"{kind.name} {':'.join(parts)!r}: {fault.reason}")
            revision = fault.revision
        self.compare_revision(key, revision)
        return stored.value if stored else None

    def require(self, kind: Kind[T], *parts: str, field: str) -> T:
        """An object that the input refers to; `Invalid` if it does not exist."""
        value = self.get(kind, *parts)
        if value is None:
            raise Invalid(f"{field}: {kind.name} {':'.join(parts)!r} does not exist: create it first", field=field)
        return value

    def all(self, kind: Kind[T], *lead: str) -> Iterator[T]:
        """Objects under a prefix; the commit fails if one of them is created or changed."""
        self.compare_prefix(kind.store_prefix(*lead))
        return self.cluster.all(kind, *lead)

    def compare_revision(self, key: StoreKey, revision: Revision) -> None:
        """Compare a key that was read in another way."""
        self._seen[key] = RevisionEquals(key, revision)

    # One compare for a whole prefix: etcd limits the number of compares.
    def compare_prefix(self, prefix: StoreKey) -> None:
        """Compare a prefix that was read in another way."""
        self._seen[prefix] = PrefixUnchangedSince(prefix, self._revision)

    def plan(self, writes: list[Write]) -> Transaction:
        """The commit of this decision. Documents keep the members that only a newer Weft knows."""
        return Transaction(tuple(self._seen.values()), tuple(map(self._with_unknown, writes)))

    def _with_unknown(self, write: Write) -> Write:
        if not isinstance(write, Put) or write.key not in self.cluster.unknown:
            return write
        return Put(write.key, codec.with_unknown(write.value, self.cluster.unknown[write.key]), write.lease)


def put(kind: Kind[T], value: T) -> Put:
    """The write that stores an object."""
    return Put(kind.store_key(*kind.key_parts(value)), codec.encode(value))


def put_claim(key: StoreKey, holder: str) -> Put:
    """The write that claims an address, tag or id."""
    return Put(key, codec.encode(model.Claim(holder=holder)))


def holder_of(kind: Kind[T], value: T) -> str:
    """The holder in a claim, such as `endpoint:default:blue:4f3a`."""
    return f"{kind.name}:{kind.key_text(value)}"
