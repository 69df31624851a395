"""Sets, maps and references of OVSDB."""

from __future__ import annotations

from weft.adapters.ovs.ovsdb.types import items_of, map_of, mapping_of, one_of, set_of, uuid


def test_sets_with_zero_one_and_many_items() -> None:
    assert items_of(set_of([])) == ()
    assert items_of(7) == items_of(set_of([7])) == (7,)
    assert items_of(uuid("a")) == items_of(set_of([uuid("a")])) == ("a",)
    assert items_of(set_of([uuid("a"), uuid("b")])) == ("a", "b")
    assert items_of(None) == ()


def test_maps_round_trip() -> None:
    assert mapping_of(map_of({"a": "1", "b": "2"})) == {"a": "1", "b": "2"}
    assert mapping_of(None) == {}


def test_optional_values_have_a_default() -> None:
    assert (one_of(set_of([]), 0), one_of(5, 0)) == (0, 5)
