"""Which concurrent commits can be merged into one transaction without a visible difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.domain.ids import StoreKey
from weft.ports.store import Compare, DeleteAll, Put, Revision, RevisionEquals, Write


class Commit(NamedTuple):
    """A requested commit."""

    compares: Sequence[Compare]
    writes: Sequence[Write]


def merged(commits: Sequence[Commit]) -> Commit:
    """One commit with all compares, without duplicates, and all writes."""
    compares = dict.fromkeys(compare for commit in commits for compare in commit.compares)
    return Commit(list(compares), [write for commit in commits for write in commit.writes])


def mergeable(commits: Sequence[Commit], *, operations: int, size: int) -> Sequence[int]:
    """The positions of commits that can be merged: the first one, and each later one that is compatible with those.

    Merging equals sequential execution only if no commit writes what another compares or writes: of two commits that
    each write what the other compares, one must fail, but merged both would succeed. A commit that deletes by prefix is
    not merged, nor one that exceeds the limits of `operations` compares or writes, or `size` bytes.
    """
    # The common case: no need to analyse it.
    if len(commits) == 1:
        return (0,)
    merge_set = _MergeSet(operations=operations, size=size)
    return [position for position, commit in enumerate(commits) if merge_set.add(commit)]


class _MergeSet:
    """The keys that the merged commits compare and write."""

    def __init__(self, *, operations: int, size: int) -> None:
        self._revisions: dict[StoreKey, Revision] = {}
        self._unchanged_prefixes: set[StoreKey] = set()
        self._written: set[StoreKey] = set()
        self._compares = operations
        self._writes = operations
        self._size = size
        self._empty = True
        self._closed = False

    def add(self, commit: Commit) -> bool:
        """Add the commit if it is compatible; the first always is."""
        size = sum(len(write.value) for write in commit.writes if isinstance(write, Put))
        if not self._empty and not self._is_compatible(commit, size):
            return False
        for compare in commit.compares:
            if isinstance(compare, RevisionEquals):
                self._revisions[compare.key] = compare.revision
            else:
                self._unchanged_prefixes.add(compare.prefix)
        for write in commit.writes:
            # Which keys it writes is not known, so nothing can be merged with it.
            if isinstance(write, DeleteAll):
                self._closed = True
            else:
                self._written.add(write.key)
        self._compares -= len(commit.compares)
        self._writes -= len(commit.writes)
        self._size -= size
        self._empty = False
        return True

    def _is_compatible(self, commit: Commit, size: int) -> bool:
        if self._closed or size > self._size:
            return False
        if len(commit.compares) > self._compares or len(commit.writes) > self._writes:
            return False
        return all(self._may_compare(compare) for compare in commit.compares) and all(
            self._may_write(write) for write in commit.writes
        )

    def _may_compare(self, compare: Compare) -> bool:
        if isinstance(compare, RevisionEquals):
            # Of two commits that expect different revisions of a key one is stale, and must not fail the other.
            expected = self._revisions.get(compare.key, compare.revision)
            return compare.key not in self._written and expected == compare.revision
        return not any(key.startswith(compare.prefix) for key in self._written)

    def _may_write(self, write: Write) -> bool:
        if isinstance(write, DeleteAll) or write.key in self._written or write.key in self._revisions:
            return False
        return not any(write.key.startswith(prefix) for prefix in self._unchanged_prefixes)
