"""A difference of two sets is what makes one the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.desired.diff import Difference, compose, diff

NUMBERS = st.frozensets(st.integers(0, 50))


@given(NUMBERS, NUMBERS)
def test_applying_the_difference_yields_what_is_wanted(wanted: frozenset[int], actual: frozenset[int]) -> None:
    difference = diff(wanted, actual, rank=lambda number: number)
    assert (actual - set(difference.drop)) | set(difference.put) == wanted
    assert not set(difference.put) & actual
    assert not set(difference.drop) & wanted


@given(NUMBERS)
def test_equal_sets_have_no_difference(numbers: frozenset[int]) -> None:
    assert not diff(numbers, numbers, rank=lambda number: number)


@given(NUMBERS, NUMBERS)
def test_things_come_in_the_order_of_their_rank_and_go_in_the_reverse(
    wanted: frozenset[int], actual: frozenset[int]
) -> None:
    difference = diff(wanted, actual, rank=lambda number: number)
    assert list(difference.put) == sorted(difference.put)
    assert list(difference.drop) == sorted(difference.drop, reverse=True)


@given(NUMBERS, st.lists(NUMBERS, max_size=5))
def test_differences_in_turn_lead_where_they_lead_one_after_the_other(
    first: frozenset[int], then: list[frozenset[int]]
) -> None:
    steps: list[Difference[int]] = []
    for before, after in zip([first, *then], then, strict=False):
        steps.append(diff(after, before, rank=lambda number: number))
    whole = compose(steps)
    assert (first - set(whole.drop)) | set(whole.put) == (then[-1] if then else first)
    assert not set(whole.put) & set(whole.drop)
