"""The set of numbers and the choice from it, against the plain and slow."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.ipam.allocator import NumberSet, choose, next_free, subtract

NUMBERS = st.one_of(st.integers(0, 70), st.integers(1000, 1050), st.integers(2040, 2060), st.integers(0, 1 << 128))
SMALL = st.sets(st.integers(0, 2100), max_size=60)
SPAN = st.tuples(st.integers(0, 2100), st.integers(0, 2100))


@given(st.lists(st.tuples(st.booleans(), NUMBERS), max_size=200))
def test_it_is_a_set(steps: list[tuple[bool, int]]) -> None:
    mine, plain = NumberSet(), set[int]()
    for add, number in steps:
        if add:
            mine.add(number)
            plain.add(number)
        else:
            mine.discard(number)
            plain.discard(number)
        assert (number in mine) == (number in plain)
        assert len(mine) == len(plain)
    assert list(mine) == sorted(plain)
    assert list(mine.copy()) == sorted(plain)


def test_a_copy_is_apart() -> None:
    one = NumberSet([1, 2])
    twin = one.copy()
    twin.add(3)
    one.discard(1)
    assert (list(one), list(twin)) == ([2], [1, 2, 3])


def test_what_is_no_number_is_not_in_it() -> None:
    assert "1" not in NumberSet([1])


@given(SMALL, SPAN)
def test_next_free_and_next_taken(taken: set[int], span: tuple[int, int]) -> None:
    numbers = NumberSet(taken)
    within = range(span[0], span[1] + 1)
    assert numbers.next_free(*span) == next((each for each in within if each not in taken), None)
    assert numbers.next_taken(*span) == next((each for each in within if each in taken), None)


@given(st.sets(NUMBERS, max_size=30), NUMBERS)
def test_next_taken_in_a_vast_span(taken: set[int], first: int) -> None:
    """A v6 pool: looking must not take as long as the pool is large."""
    expected = min((each for each in taken if each >= first), default=None)
    assert NumberSet(taken).next_taken(first, 1 << 128) == expected


@given(SMALL, SMALL, SPAN)
def test_next_free_of_several_sets(one: set[int], other: set[int], span: tuple[int, int]) -> None:
    expected = next((each for each in range(span[0], span[1] + 1) if each not in one | other), None)
    assert next_free((NumberSet(one), NumberSet(other)), *span) == expected


@given(SMALL, SPAN, st.booleans())
def test_runs(taken: set[int], span: tuple[int, int], want_taken: bool) -> None:
    """The runs hold exactly the numbers asked for, in order, and no two of them touch."""
    runs = list(NumberSet(taken).runs(*span, taken=want_taken))
    numbers = [number for first, last in runs for number in range(first, last + 1)]
    assert numbers == [each for each in range(span[0], span[1] + 1) if (each in taken) == want_taken]
    assert all(end + 1 < start for (_, end), (start, _) in pairwise(runs))


@given(SMALL, SMALL, SMALL, st.lists(SPAN, max_size=4))
def test_choose(taken: set[int], held: set[int], cooling: set[int], spans: list[tuple[int, int]]) -> None:
    """Lowest free first; one that rests only when nothing else is free; never one that is taken or held."""
    free = [each for first, last in spans for each in range(first, last + 1) if each not in taken | held]
    rested = [each for each in free if each not in cooling]
    chosen = choose(NumberSet(taken), spans, held=NumberSet(held), cooling=NumberSet(cooling))
    assert chosen == next(iter(rested or free), None)


@given(SPAN, st.lists(SPAN, max_size=6))
def test_subtract(span: tuple[int, int], holes: list[tuple[int, int]]) -> None:
    holes = [(min(hole), max(hole)) for hole in holes]
    left = [each for first, last in subtract(span, holes) for each in range(first, last + 1)]
    gone = {each for first, last in holes for each in range(first, last + 1)}
    assert left == [each for each in range(span[0], span[1] + 1) if each not in gone]
