"""Ids depend on the set of keys alone, even with collisions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.domain.policy.policymap.stable_ids import StableIds

KEYS = st.text(alphabet="abcd", min_size=1, max_size=3)


def assigned(keys: set[str], *, bits: int) -> dict[str, int]:
    ids: StableIds[str] = StableIds(bits=bits)
    for key in keys:
        ids.add(key, key)
    return {key: ids[key] for key in keys}


@given(st.lists(st.tuples(st.booleans(), KEYS), max_size=60))
def test_ids_do_not_depend_on_the_order_of_changes(steps: list[tuple[bool, str]]) -> None:
    ids: StableIds[str] = StableIds(bits=7)
    expected: dict[str, int] = {}
    for adds, key in steps:
        if adds and key not in expected:
            ids.add(key, key)
            assert key not in ids.reassigned
            expected[key] = ids[key]
        elif not adds and key in expected:
            ids.remove(key)
            del expected[key]
        for reassigned in ids.reassigned:
            expected[reassigned] = ids[reassigned]
        ids.reassigned.clear()
        assert expected == assigned(set(expected), bits=7)
        assert len(set(expected.values())) == len(expected)
        assert all(0 < value < 1 << 7 for value in expected.values())


def test_an_id_is_the_same_in_every_process() -> None:
    """Pinned from another process: if ids changed, restarts and upgrades would rewrite every policy map."""
    assert assigned({"a", "b"}, bits=28) == {"a": 205163564, "b": 15412653}
