"""An interval map over the IPv4 and IPv6 address space: the set of labels of each range.

Adjacent ranges with equal labels are merged, so the map depends only on the labels in it, not on the order of changes.
Many labels are changed in one pass: each range is split and gets its new labels once, however many labels change on
it. One pass per label would cost the cube of the number of overlapping labels.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from weft.domain.addresses import BITS, Address, Range

L = TypeVar("L", bound=Hashable)


class IntervalChange(NamedTuple, Generic[L]):
    """The ranges that a change overlaps, with their labels before and after it."""

    before: list[tuple[Range, frozenset[L]]]
    after: list[tuple[Range, frozenset[L]]]


class _Window(NamedTuple, Generic[L]):
    """The pieces `start` to `stop` of a family's list, which end before the address `end`, and their replacement."""

    start: int
    stop: int
    end: int
    after: list[tuple[int, frozenset[L]]]


class IntervalMap(Generic[L]):
    """Maps every address to a set of labels. Initially all sets are empty."""

    def __init__(self) -> None:
        # By family: the first address of each range, ascending, and its labels at the same index.
        self._firsts: dict[int, list[int]] = {4: [0], 6: [0]}
        self._labels: dict[int, list[frozenset[L]]] = {4: [frozenset()], 6: [frozenset()]}

    def at(self, address: Address) -> frozenset[L]:
        """Return the labels of an address."""
        return self._labels[address.family][bisect_right(self._firsts[address.family], address.number) - 1]

    def change(
        self, added: Mapping[L, Iterable[Range]], removed: Mapping[L, Iterable[Range]]
    ) -> Iterator[IntervalChange[L]]:
        """Add labels that are absent so far, each to ranges that do not overlap, and remove labels from the ranges they
        were added to. Lazy: consume the iterator.
        """
        for family in BITS:
            # A label of either kind toggles at the first address of each of its ranges, and behind the last.
            toggles: defaultdict[int, list[L]] = defaultdict(list)
            spans: list[tuple[int, int]] = []
            for label, ranges in chain(added.items(), removed.items()):
                for span in ranges:
                    if span.family == family:
                        spans.append((span.first, span.last))
                        toggles[span.first].append(label)
                        toggles[span.last + 1].append(label)
            if spans:
                yield from self._toggle(family, spans, toggles)

    def _toggle(
        self, family: int, spans: list[tuple[int, int]], toggles: Mapping[int, list[L]]
    ) -> Iterator[IntervalChange[L]]:
        firsts, labels = self._firsts[family], self._labels[family]
        edges = sorted(toggles)
        windows: list[_Window[L]] = []
        for start, stop in _index_windows(firsts, spans):
            end = firsts[stop] if stop < len(firsts) else 1 << BITS[family]
            inside = edges[bisect_left(edges, firsts[start]) : bisect_left(edges, end)]
            pieces = dict(zip(firsts[start:stop], labels[start:stop], strict=True))
            windows.append(_Window(start, stop, end, _toggled(pieces, inside, toggles)))
        changes = [
            IntervalChange(
                _ranges(family, list(zip(firsts[start:stop], labels[start:stop], strict=True)), end=end),
                _ranges(family, after, end=end),
            )
            for start, stop, end, after in windows
        ]
        # The lists are put together once: a slice assignment per window would move their tails thousands of times.
        new_firsts: list[int] = []
        new_labels: list[frozenset[L]] = []
        done = 0
        for start, stop, _, after in windows:
            new_firsts += firsts[done:start]
            new_firsts += [first for first, _ in after]
            new_labels += labels[done:start]
            new_labels += [range_labels for _, range_labels in after]
            done = stop
        self._firsts[family] = new_firsts + firsts[done:]
        self._labels[family] = new_labels + labels[done:]
        yield from changes


def _index_windows(firsts: list[int], spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pieces that spans overlap, as disjoint ascending windows of indexes."""
    windows: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        # Include the neighbours on both sides: either may have to merge with the changed range.
        start = max(bisect_left(firsts, first) - 1, 0)
        stop = min(bisect_right(firsts, last + 1), len(firsts))
        if windows and start < windows[-1][1]:
            windows[-1] = windows[-1][0], max(windows[-1][1], stop)
        else:
            windows.append((start, stop))
    return windows


def _toggled(
    pieces: Mapping[int, frozenset[L]], edges: Iterable[int], toggles: Mapping[int, list[L]]
) -> list[tuple[int, frozenset[L]]]:
    """The pieces by first address, split at the edges, with labels toggled and equal neighbours merged."""
    toggled: list[tuple[int, frozenset[L]]] = []
    active: set[L] = set()
    before: frozenset[L] = frozenset()
    for position in sorted({*pieces, *edges}):
        before = pieces.get(position, before)
        for label in toggles.get(position, ()):
            active ^= {label}
        after = before ^ active if active else before
        # Pieces are contiguous, so a piece with the labels of its predecessor needs no start of its own.
        if not toggled or toggled[-1][1] != after:
            toggled.append((position, after))
    return toggled


def _ranges(family: int, pieces: list[tuple[int, frozenset[L]]], *, end: int) -> list[tuple[Range, frozenset[L]]]:
    ends = [*(first for first, _ in pieces[1:]), end]
    return [(Range(family, first, after - 1), labels) for (first, labels), after in zip(pieces, ends, strict=True)]
