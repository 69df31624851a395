"""An interval map over the IPv4 and IPv6 address space: the set of labels of each range.

Adjacent ranges with equal labels are merged, so the map depends only on the labels in it, not on the order of changes.
A change costs time in proportion to the ranges it overlaps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from weft.domain.addresses import BITS, Address, Range

L = TypeVar("L", bound=Hashable)


class IntervalChange(NamedTuple, Generic[L]):
    """The ranges that a change overlaps, with their labels before and after it."""

    before: list[tuple[Range, frozenset[L]]]
    after: list[tuple[Range, frozenset[L]]]


class IntervalMap(Generic[L]):
    """Maps every address to a set of labels. Initially all sets are empty."""

    def __init__(self) -> None:
        # By family: the first address of each range, ascending, and its labels at the same index.
        self._firsts: dict[int, list[int]] = {4: [0], 6: [0]}
        self._labels: dict[int, list[frozenset[L]]] = {4: [frozenset()], 6: [frozenset()]}

    def at(self, address: Address) -> frozenset[L]:
        """Return the labels of an address."""
        return self._labels[address.family][bisect_right(self._firsts[address.family], address.number) - 1]

    def add(self, label: L, spans: Iterable[Range]) -> Iterator[IntervalChange[L]]:
        """Add a label that is absent so far to ranges that do not overlap. Lazy: consume the iterator."""
        for span in spans:
            yield self._change(span, lambda labels: labels | {label})

    def remove(self, label: L, spans: Iterable[Range]) -> Iterator[IntervalChange[L]]:
        """Remove a label from the ranges it was added to. Lazy: consume the iterator."""
        for span in spans:
            yield self._change(span, lambda labels: labels - {label})

    def _change(self, span: Range, change: Callable[[frozenset[L]], frozenset[L]]) -> IntervalChange[L]:
        firsts, labels = self._firsts[span.family], self._labels[span.family]
        # Include the neighbours on both sides: either may have to merge with the changed range.
        start = max(bisect_left(firsts, span.first) - 1, 0)
        stop = min(bisect_right(firsts, span.last + 1), len(firsts))
        before = list(zip(firsts[start:stop], labels[start:stop], strict=True))
        end = firsts[stop] if stop < len(firsts) else 1 << BITS[span.family]
        after = _merged(_split(_ranges(span.family, before, end=end), span, change=change))
        # Slice assignment moves the tail once, which is far cheaper than rebuilding the lists.
        firsts[start:stop] = [first for first, _ in after]
        labels[start:stop] = [range_labels for _, range_labels in after]
        return IntervalChange(_ranges(span.family, before, end=end), _ranges(span.family, after, end=end))


def _split(
    pieces: Iterable[tuple[Range, frozenset[L]]], span: Range, *, change: Callable[[frozenset[L]], frozenset[L]]
) -> Iterator[tuple[int, frozenset[L]]]:
    """Yield the pieces by first address, split at the span, with the labels inside the span changed."""
    for piece, labels in pieces:
        if piece.first < span.first:
            yield piece.first, labels
        if piece.overlaps(span):
            yield max(piece.first, span.first), change(labels)
        if piece.last > span.last:
            yield max(piece.first, span.last + 1), labels


def _merged(pieces: Iterable[tuple[int, frozenset[L]]]) -> list[tuple[int, frozenset[L]]]:
    merged: list[tuple[int, frozenset[L]]] = []
    for piece in pieces:
        # Pieces are contiguous, so a piece with the labels of its predecessor needs no start of its own.
        if not merged or merged[-1][1] != piece[1]:
            merged.append(piece)
    return merged


def _ranges(family: int, pieces: list[tuple[int, frozenset[L]]], *, end: int) -> list[tuple[Range, frozenset[L]]]:
    ends = [*(first for first, _ in pieces[1:]), end]
    return [(Range(family, first, after - 1), labels) for (first, labels), after in zip(pieces, ends, strict=True)]
