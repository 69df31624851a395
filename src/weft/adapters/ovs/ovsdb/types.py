"""Encode and decode OVSDB values (RFC 7047, 5.1): sets, maps and row references (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from weft.domain.errors import DatapathFault

# JSON in the notation of RFC 7047: `["set", […]]`, `["map", […]]`, `["uuid", "…"]` or a scalar.
Value = Any

# Columns whose values are used without a further look, by table; the rest are sets of texts.
_TEXTS: Final = frozenset({("Bridge", "name"), ("Port", "name"), ("Interface", "name"), ("Bridge", "datapath_type")})
_NUMBERS: Final = frozenset({("Open_vSwitch", "next_cfg"), ("Open_vSwitch", "cur_cfg")})
_SETS_OF_NUMBERS: Final = frozenset(
    {("Interface", "ofport"), ("Interface", "ofport_request"), ("Interface", "ifindex"), ("Port", "tag")}
)
_MAPS: Final = frozenset(
    {
        ("Open_vSwitch", "other_config"),
        ("Bridge", "external_ids"),
        ("Bridge", "flow_tables"),
        ("Port", "external_ids"),
        ("Interface", "external_ids"),
    }
)


def check_row(table: str, row: Value, columns: Iterable[str]) -> None:
    """`DatapathFault` unless the row has these columns, with values of their types."""
    if not isinstance(row, dict):
        raise DatapathFault(f"ovsdb: a row of {table} is not an object")
    for column in columns:
        if column not in row or not _is_valid(table, column, row[column]):
            raise DatapathFault(f"ovsdb: column {column} of a row of {table} is absent or not of its type")


def _is_valid(table: str, column: str, value: Value) -> bool:
    place = (table, column)
    if place in _TEXTS:
        return isinstance(value, str)
    if place in _NUMBERS:
        return isinstance(value, int)
    if place in _MAPS:
        return _is_map(value)
    kind = int if place in _SETS_OF_NUMBERS else str
    return all(isinstance(item, kind) for item in items_of(value))


def _is_pair(pair: Value) -> bool:
    """Keys are texts, or the numbers of flow tables; values are texts or references."""
    match pair:
        case [str() | int(), value]:
            return isinstance(_plain(value), str)
        case _:
            return False


def _is_map(value: Value) -> bool:
    match value:
        case ["map", list(pairs)]:
            return all(map(_is_pair, pairs))
        case _:
            return False


def uuid(of: str) -> Value:
    """A reference to an existing row."""
    return ["uuid", of]


def named_uuid(name: str) -> Value:
    """A reference to a row that the same transaction inserts under this name."""
    return ["named-uuid", name]


def set_of(items: Iterable[Value]) -> Value:
    return ["set", [*items]]


def map_of(items: Mapping[str, str]) -> Value:
    return ["map", [[key, value] for key, value in items.items()]]


def items_of(value: Value) -> tuple[Any, ...]:
    """The items of a set; RFC 7047 writes a set of one as the bare value. References decode to UUIDs."""
    match value:
        case ["set", list(items)]:
            return tuple(_plain(item) for item in items)
        case None:
            return ()
        case _:
            return (_plain(value),)


def mapping_of(value: Value) -> dict[str, str]:
    match value:
        case ["map", list(pairs)]:
            return dict(pairs)
        case _:
            return {}


def one_of(value: Value, default: Value = None) -> Value:
    """The item of a set with at most one item."""
    items = items_of(value)
    return items[0] if items else default


def _plain(value: Value) -> Value:
    match value:
        case ["uuid", str(found)]:
            return found
        case _:
            return value
