"""Which commits may be made one without anyone being able to tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.domain.ids import StoreKey
from weft.ports.store import Compare, DeleteAll, Put, Revision, RevisionEquals, Write


class Commit(NamedTuple):
    """A commit as it was asked for."""

    compares: Sequence[Compare]
    writes: Sequence[Write]


def merged(commits: Sequence[Commit]) -> Commit:
    """All compares, each once, and all writes."""
    compares = dict.fromkeys(compare for commit in commits for compare in commit.compares)
    return Commit(list(compares), [write for commit in commits for write in commit.writes])


def mergeable(commits: Sequence[Commit], *, operations: int, size: int) -> Sequence[int]:
    """The positions of commits that can be merged: the first one, and each later one that fits to those before it.

    Merging is the same as carrying out one after another only if no commit writes what another compares or writes: two
    that each write what the other compares would both succeed, though one of them must fail. A commit that deletes by
    prefix stays alone, as does one that would bring the whole above `operations` compares or writes, or `size` bytes.
    """
    if len(commits) == 1:
        return (0,)
    together = _Together(operations=operations, size=size)
    return [position for position, commit in enumerate(commits) if together.take(commit)]


class _Together:
    """What the commits taken so far compare and write."""

    def __init__(self, *, operations: int, size: int) -> None:
        self._at: dict[StoreKey, Revision] = {}
        self._quiet: set[StoreKey] = set()
        self._written: set[StoreKey] = set()
        self._compares = operations
        self._writes = operations
        self._size = size
        self._empty = True
        self._closed = False

    def take(self, commit: Commit) -> bool:
        """Take the commit in if it fits; the first always does."""
        size = sum(len(write.value) for write in commit.writes if isinstance(write, Put))
        if not self._empty and not self._fits(commit, size):
            return False
        for compare in commit.compares:
            if isinstance(compare, RevisionEquals):
                self._at[compare.key] = compare.revision
            else:
                self._quiet.add(compare.prefix)
        for write in commit.writes:
            if isinstance(write, DeleteAll):
                self._closed = True
            else:
                self._written.add(write.key)
        self._compares -= len(commit.compares)
        self._writes -= len(commit.writes)
        self._size -= size
        self._empty = False
        return True

    def _fits(self, commit: Commit, size: int) -> bool:
        if self._closed or size > self._size:
            return False
        if len(commit.compares) > self._compares or len(commit.writes) > self._writes:
            return False
        return all(self._may_compare(compare) for compare in commit.compares) and all(
            self._may_write(write) for write in commit.writes
        )

    def _may_compare(self, compare: Compare) -> bool:
        if isinstance(compare, RevisionEquals):
            # Of two that expect different revisions of a key one is stale, and must not pull the other down.
            return compare.key not in self._written and self._at.get(compare.key, compare.revision) == compare.revision
        return not any(key.startswith(compare.prefix) for key in self._written)

    def _may_write(self, write: Write) -> bool:
        if isinstance(write, DeleteAll) or write.key in self._written or write.key in self._at:
            return False
        return not any(write.key.startswith(prefix) for prefix in self._quiet)
