"""The addresses of both families in ranges, each with the labels that hold for all of it.

A label is laid over ranges and taken off them. Neighbours with the same labels are one range, so the map depends on
nothing but the labels that lie on it; each change costs in proportion to the ranges it meets.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

from weft.domain.addresses import BITS, Address, Range

L = TypeVar("L", bound=Hashable)


class Relabelled(NamedTuple, Generic[L]):
    """The ranges that a change met, as they were and as they are, with what is laid over each."""

    before: list[tuple[Range, frozenset[L]]]
    after: list[tuple[Range, frozenset[L]]]


class IntervalMap(Generic[L]):
    """See the module. In the beginning nothing has a label."""

    def __init__(self) -> None:
        self._firsts: dict[int, list[int]] = {4: [0], 6: [0]}
        self._labels: dict[int, list[frozenset[L]]] = {4: [frozenset()], 6: [frozenset()]}

    def at(self, address: Address) -> frozenset[L]:
        """What lies over an address."""
        return self._labels[address.family][bisect_right(self._firsts[address.family], address.number) - 1]

    def add(self, label: L, spans: Iterable[Range]) -> Iterator[Relabelled[L]]:
        """Put a label, which lies nowhere, over ranges that do not overlap."""
        for span in spans:
            yield self._change(span, lambda labels: labels | {label})

    def remove(self, label: L, spans: Iterable[Range]) -> Iterator[Relabelled[L]]:
        """Take a label off the ranges it was put over."""
        for span in spans:
            yield self._change(span, lambda labels: labels - {label})

    def _change(self, span: Range, change: Callable[[frozenset[L]], frozenset[L]]) -> Relabelled[L]:
        firsts, labels = self._firsts[span.family], self._labels[span.family]
        # From the neighbour before the span to the one after it, as either may become one with what is changed.
        start = max(bisect_left(firsts, span.first) - 1, 0)
        stop = min(bisect_right(firsts, span.last + 1), len(firsts))
        before = list(zip(firsts[start:stop], labels[start:stop], strict=True))
        end = firsts[stop] if stop < len(firsts) else 1 << BITS[span.family]
        after = _merged(_cut(_ranges(span.family, before, end=end), span, change=change))
        firsts[start:stop] = [first for first, _ in after]
        labels[start:stop] = [each for _, each in after]
        return Relabelled(_ranges(span.family, before, end=end), _ranges(span.family, after, end=end))


def _cut(
    pieces: Iterable[tuple[Range, frozenset[L]]], span: Range, *, change: Callable[[frozenset[L]], frozenset[L]]
) -> Iterator[tuple[int, frozenset[L]]]:
    """The pieces, each by its first address, with what lies within the span changed."""
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
        if not merged or merged[-1][1] != piece[1]:
            merged.append(piece)
    return merged


def _ranges(family: int, pieces: list[tuple[int, frozenset[L]]], *, end: int) -> list[tuple[Range, frozenset[L]]]:
    ends = [*(first for first, _ in pieces[1:]), end]
    return [(Range(family, first, after - 1), labels) for (first, labels), after in zip(pieces, ends, strict=True)]
