"""Capture files: the classic format with nanoseconds (draft-ietf-opsawg-pcap), which every analyser reads."""

from __future__ import annotations

import struct

_MAGIC_NS = 0xA1B23C4D
_ETHERNET = 1
# Bytes of a packet that are kept at most.
LONGEST = 262_144


def file_header() -> bytes:
    """What a file begins with."""
    return struct.pack("=IHHiIII", _MAGIC_NS, 2, 4, 0, 0, LONGEST, _ETHERNET)


def record(data: bytes, *, length: int, at_ns: int) -> bytes:
    """One packet: what was kept of it, how long it was, and when it was seen."""
    seconds, nanoseconds = divmod(at_ns, 1_000_000_000)
    return struct.pack("=IIII", seconds, nanoseconds, len(data), length) + data
