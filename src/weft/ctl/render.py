"""Formats output: aligned tables, names, and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from weft.ctl.client import Row


class Column(NamedTuple):
    """A column of a table: its title, its JSON member, and the text for a missing member, since REST omits zeros."""

    title: str
    member: str
    absent: str = ""


def table(columns: Sequence[Column], rows: Iterable[Row]) -> str:
    """Format rows as aligned columns; the same on a terminal and in a pipe."""
    lines = [[column.title for column in columns], ["-" * len(column.title) for column in columns]]
    # Two spaces between columns and no trailing blanks, so that awk and diff work on the output.
    lines += [[_cell(row.get(column.member), absent=column.absent) for column in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n" for line in lines
    )


def card(columns: Sequence[Column], row: Row) -> str:
    """Format one object as lines `Title: value`, the values aligned."""
    width = max(len(column.title) for column in columns) + 1
    return "".join(
        f"{column.title + ':':{width}} {_cell(row.get(column.member), absent=column.absent)}".rstrip() + "\n"
        for column in columns
    )


def names(member: str, rows: Iterable[Row]) -> str:
    """One name per line."""
    return "".join(f"{row.get(member, '')}\n" for row in rows)


def json_array(rows: Iterable[Row]) -> str:
    """A JSON array with one object per line, for `jq` and for `grep`."""
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return f"[\n{lines}\n]\n" if lines else "[]\n"


def json_document(value: object) -> str:
    """Indented JSON."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _cell(value: object, *, absent: str) -> str:
    # REST omits members with zero values (Go's omitempty in Contiv), so a missing number is printed as 0.
    if value is None:
        return absent
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value)
