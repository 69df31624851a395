"""Choose numbers from a pool, given what is taken: lowest free first, released ones rest while others are free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

_CHUNK = 1024
_FULL = (1 << _CHUNK) - 1


class NumberSet:
    """A sparse set of non-negative integers that finds the next free one fast: 1,024-bit chunks in a dict."""

    __slots__ = ("_chunks", "_size")

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._chunks: dict[int, int] = {}
        self._size = 0
        for number in numbers:
            self.add(number)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        chunk, bit = divmod(number, _CHUNK)
        return bool(self._chunks.get(chunk, 0) >> bit & 1)

    def add(self, number: int) -> None:
        chunk, bit = divmod(number, _CHUNK)
        before = self._chunks.get(chunk, 0)
        after = before | 1 << bit
        if after != before:
            self._chunks[chunk] = after
            self._size += 1

    def discard(self, number: int) -> None:
        chunk, bit = divmod(number, _CHUNK)
        before = self._chunks.get(chunk, 0)
        if before >> bit & 1:
            after = before & ~(1 << bit)
            self._size -= 1
            if after:
                self._chunks[chunk] = after
            else:
                del self._chunks[chunk]

    def copy(self) -> NumberSet:
        twin = NumberSet()
        twin._chunks = dict(self._chunks)
        twin._size = self._size
        return twin

    def chunk(self, index: int) -> int:
        """The bits of the numbers from `index * 1024` on."""
        return self._chunks.get(index, 0)

    def next_free(self, first: int, last: int) -> int | None:
        """The lowest number of `first..last` that is not in the set."""
        return next_free((self,), first, last)

    def next_taken(self, first: int, last: int) -> int | None:
        """The lowest number of `first..last` that is in the set."""
        if last - first > _CHUNK * len(self._chunks):
            return self._next_taken_sparse(first, last)
        while first <= last:
            chunk, bit = divmod(first, _CHUNK)
            taken = self._chunks.get(chunk, 0) >> bit
            if taken:
                found = first + (taken & -taken).bit_length() - 1
                return found if found <= last else None
            first = (chunk + 1) * _CHUNK
        return None

    def _next_taken_sparse(self, first: int, last: int) -> int | None:
        for chunk in sorted(self._chunks):
            if chunk >= first // _CHUNK:
                bit = max(first - chunk * _CHUNK, 0)
                taken = self._chunks[chunk] >> bit
                if taken:
                    found = chunk * _CHUNK + bit + (taken & -taken).bit_length() - 1
                    return found if found <= last else None
        return None

    def __iter__(self) -> Iterator[int]:
        for chunk in sorted(self._chunks):
            bits, base = self._chunks[chunk], chunk * _CHUNK
            while bits:
                low = bits & -bits
                yield base + low.bit_length() - 1
                bits ^= low

    def runs(self, first: int, last: int, *, taken: bool) -> Iterator[tuple[int, int]]:
        """The runs of taken (or free) numbers within `first..last`, in order."""
        start_of, end_of = (self.next_taken, self.next_free) if taken else (self.next_free, self.next_taken)
        while first <= last:
            start = start_of(first, last)
            if start is None:
                return
            end = end_of(start, last)
            yield start, last if end is None else end - 1
            first = last + 1 if end is None else end


EMPTY = NumberSet()


def choose(
    taken: NumberSet, spans: Collection[tuple[int, int]], *, held: NumberSet = EMPTY, resting: NumberSet = EMPTY
) -> int | None:
    """The lowest number of the spans that is neither taken nor held; a resting one only when nothing else is free."""
    for sets in ((taken, held, resting), (taken, held)):
        for first, last in spans:
            number = next_free(sets, first, last)
            if number is not None:
                return number
    return None


def next_free(sets: Collection[NumberSet], first: int, last: int) -> int | None:
    """The lowest number of `first..last` that is in none of the sets."""
    while first <= last:
        chunk, bit = divmod(first, _CHUNK)
        taken = 0
        for numbers in sets:
            taken |= numbers.chunk(chunk)
        free = ~(taken >> bit) & (_FULL >> bit)
        if free:
            found = first + (free & -free).bit_length() - 1
            return found if found <= last else None
        first = (chunk + 1) * _CHUNK
    return None


def subtract(span: tuple[int, int], holes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is left of a span without the holes, in order."""
    first, last = span
    for low, high in sorted(holes):
        if high < first or low > last:
            continue
        if first < low:
            yield first, low - 1
        first = max(first, high + 1)
    if first <= last:
        yield first, last
