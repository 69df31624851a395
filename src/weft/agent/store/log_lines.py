"""The lines of the attachment log: a checksum before each, and a reader that loses no more than the damaged ones.

A flipped bit may also hit the newline between two lines, and garbage may stand where none was. So a line whose checksum
is wrong is searched for whole lines inside it.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

# The beginning of a line: the checksum, and the JSON object that it covers.
_BEGINNING = re.compile(rb"[0-9a-f]{8} (?=\{)")
_PREFIX = 9

# How many beginnings are tried in one damaged line: each costs a checksum over the rest of it.
_MAX_BEGINNINGS = 32


class LogLine(NamedTuple):
    """A line; without a body it is damaged. `end` is the offset behind it in the file."""

    body: bytes | None
    end: int


def encode_line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def read_lines(data: bytes) -> Iterator[LogLine]:
    """All lines in order. A last line without a newline that is torn is left out: a kill leaves one."""
    start = 0
    while start < len(data):
        newline = data.find(b"\n", start)
        is_last = newline < 0
        end = len(data) if is_last else newline
        line = data[start:end]
        start = end + 1
        if not line:
            continue  # a repaired file has empty lines
        if (body := _body(line)) is not None:
            yield LogLine(body, end)
            continue
        found = [*_search(line)]
        yield from (LogLine(body, end) for body in found)
        if not is_last or found:
            yield LogLine(None, end)


def _body(line: bytes) -> bytes | None:
    """What stands behind the checksum; None if it is wrong."""
    body = line[_PREFIX:]
    return body if line[:_PREFIX] == b"%08x " % zlib.crc32(body) else None


def _search(line: bytes) -> Iterator[bytes]:
    """The whole lines inside a damaged one: two whose newline is damaged, or one behind garbage."""
    beginnings = [match.start() for match in itertools.islice(_BEGINNING.finditer(line), _MAX_BEGINNINGS)]
    for start, following in itertools.pairwise([*beginnings, len(line) + 1]):
        # Up to the next beginning, where the byte before it may be the damaged newline, or up to the end.
        for end in (following - 1, following, len(line) - 1):
            if (body := _body(line[start:end])) is not None:
                yield body
                break
