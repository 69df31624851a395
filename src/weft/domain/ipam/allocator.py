"""Allocation of numbers from a pool: the lowest free one first, one in cooldown only if no other is free."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

# Addresses of a block. Calico's default too: small enough for many nodes, and a node seldom asks for another.
BLOCK_SIZE = 64
# Bits of one chunk: Python finds a free bit in an integer of this size faster than in many small ones.
_CHUNK = 1024
_FULL = (1 << _CHUNK) - 1


class NumberSet:
    """A sparse set of non-negative integers with a fast search for the next free one: a dict of bitmap chunks."""

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
            # Empty chunks are removed, so that the sparse search does not visit them.
            if after:
                self._chunks[chunk] = after
            else:
                del self._chunks[chunk]

    def copy(self) -> NumberSet:
        copied = NumberSet()
        copied._chunks = dict(self._chunks)
        copied._size = self._size
        return copied

    def chunk(self, index: int) -> int:
        """The bits of the numbers from `index * 1024` on."""
        return self._chunks.get(index, 0)

    def next_free(self, first: int, last: int) -> int | None:
        """The lowest number of `first..last` that is not in the set."""
        return next_free((self,), first, last)

    def next_taken(self, first: int, last: int) -> int | None:
        """The lowest number of `first..last` that is in the set."""
        # An IPv6 range has more chunks than any set: visit the chunks of the set instead of those of the range.
        if last - first > _CHUNK * len(self._chunks):
            return self._next_taken_sparse(first, last)
        while first <= last:
            chunk, bit = divmod(first, _CHUNK)
            taken = self._chunks.get(chunk, 0) >> bit
            if taken:
                found = first + (taken & -taken).bit_length() - 1  # the lowest set bit
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
    taken: NumberSet, spans: Collection[tuple[int, int]], *, held: NumberSet = EMPTY, cooling: NumberSet = EMPTY
) -> int | None:
    """The lowest number of the spans that is neither taken nor held; one in cooldown only if nothing else is free."""
    # Two passes: a cooling address is better than none.
    for sets in ((taken, held, cooling), (taken, held)):
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
        # The mask keeps the inverted bits above the chunk, which Python extends without end, from looking free.
        free = ~(taken >> bit) & (_FULL >> bit)
        if free:
            found = first + (free & -free).bit_length() - 1
            return found if found <= last else None
        first = (chunk + 1) * _CHUNK
    return None


def subtract(span: tuple[int, int], holes: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """A span without the holes, in order."""
    first, last = span
    for low, high in sorted(holes):
        if high < first or low > last:
            continue
        if first < low:
            yield first, low - 1
        first = max(first, high + 1)
    if first <= last:
        yield first, last
