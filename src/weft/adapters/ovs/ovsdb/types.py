"""Encode and decode OVSDB values (RFC 7047, 5.1): sets, maps and row references (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

# JSON in the notation of RFC 7047: `["set", […]]`, `["map", […]]`, `["uuid", "…"]` or a scalar.
Value = Any


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
