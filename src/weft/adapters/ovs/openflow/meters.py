"""Meters of a switch as values, as OpenFlow 1.4 messages, and out of the switch's answers.

A meter drops what comes faster than its rate. A flow may name one only that is there, and goes when its meter goes. A
meter has no cookie: those of our bridge that have the number of a port of it are ours (`shaping`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from weft.adapters.ovs.openflow.fields import unpack
from weft.domain.errors import DatapathFault

_FORM = struct.Struct("!HHI")
_BAND_FORM = struct.Struct("!HHII4x")
_REQUEST_FORM = struct.Struct("!I4x")
_ADD, _MODIFY, _DELETE = 0, 1, 2
_DROP_BAND = 1
_KILOBITS, _PACKETS, _BURST, _STATISTICS = 1, 2, 4, 8
_ALL = 0xFFFFFFFF
# Above are meters of the switch itself.
_LARGEST_NUMBER = 0xFFFF0000


class Meter(msgspec.Struct, frozen=True, gc=False):
    """How much may pass: kilobits per second and at once after a pause, or packets instead of kilobits."""

    number: int
    rate: int
    burst: int
    is_of_packets: bool = False

    def __str__(self) -> str:
        unit = "packets" if self.is_of_packets else "kbit"
        return f"{self.number} of {self.rate} {unit}/s with bursts of {self.burst} {unit}"


def add_meter(meter: Meter) -> bytes:
    """The body of a message that makes a meter, which must not be there."""
    return _mod(_ADD, meter)


def alter_meter(meter: Meter) -> bytes:
    """The body of a message that changes a meter that is there; flows that name it stay."""
    return _mod(_MODIFY, meter)


def delete_meter(number: int) -> bytes:
    """The body of a message that takes a meter away, with all flows that name it; gone already is fine."""
    return _FORM.pack(_DELETE, 0, number)


def _mod(command: int, meter: Meter) -> bytes:
    band = _BAND_FORM.pack(_DROP_BAND, _BAND_FORM.size, meter.rate, meter.burst)
    return _FORM.pack(command, _flags(meter), meter.number) + band


def _flags(meter: Meter) -> int:
    return (_PACKETS if meter.is_of_packets else _KILOBITS) | _BURST | _STATISTICS


def meters_request() -> bytes:
    """The body of a question for all meters."""
    return _REQUEST_FORM.pack(_ALL)


def decode_meters(data: bytes) -> Iterator[Meter]:
    """The meters of one part of the answer, without those of the switch itself; one of another form has rate 0."""
    at = 0
    while at < len(data):
        length, flags, number = unpack(_FORM, data, at)
        if length < _FORM.size or at + length > len(data):
            raise DatapathFault("openflow: a meter of an impossible length")
        if number <= _LARGEST_NUMBER:
            yield _decode(data[at : at + length], flags=flags, number=number)
        at += length


def _decode(entry: bytes, *, flags: int, number: int) -> Meter:
    if len(entry) == _FORM.size + _BAND_FORM.size:
        kind, _, rate, burst = unpack(_BAND_FORM, entry, _FORM.size)
        found = Meter(number, rate, burst, is_of_packets=bool(flags & _PACKETS))
        if kind == _DROP_BAND and flags == _flags(found):
            return found
    return Meter(number, 0, 0)
