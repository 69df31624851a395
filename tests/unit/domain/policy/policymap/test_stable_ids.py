"""Numbers follow from the set of keys alone, collisions included."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.policy.policymap.stable_ids import StableIds

KEYS = st.text(alphabet="abcd", min_size=1, max_size=3)


def numbered(keys: set[str], *, bits: int) -> dict[str, int]:
    numbers: StableIds[str] = StableIds(bits=bits)
    for key in keys:
        numbers.add(key, key)
    return {key: numbers[key] for key in keys}


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=60))
def test_the_numbers_do_not_depend_on_the_way_to_them(steps: list[tuple[bool, str]]) -> None:
    numbers: StableIds[str] = StableIds(bits=7)
    held: dict[str, int] = {}
    for adds, key in steps:
        if adds and key not in held:
            numbers.add(key, key)
            assert key not in numbers.moved
            held[key] = numbers[key]
        elif not adds and key in held:
            numbers.remove(key)
            del held[key]
        for moved in numbers.moved:
            held[moved] = numbers[moved]
        numbers.moved.clear()
        assert held == numbered(set(held), bits=7)
        assert len(set(held.values())) == len(held)
        assert all(0 < number < 1 << 7 for number in held.values())


def test_a_number_is_the_same_everywhere() -> None:
    """It was made once, by another process; should it change, restarts and upgrades would rewrite every table."""
    assert numbered({"a", "b"}, bits=28) == {"a": 205163564, "b": 15412653}
