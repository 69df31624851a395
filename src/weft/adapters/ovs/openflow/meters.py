"""Meters: as values, as OpenFlow 1.4 meter mods, and decoded from multipart replies.

A meter drops packets above its rate. A flow can refer only to an existing meter and is deleted with it. Meters have no
cookie: those on our bridge whose id is the number of one of its ports are ours (`pipeline.qos`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from weft.adapters.ovs.openflow.constants import (
    OFPM_ALL,
    OFPM_MAX,
    OFPMBT_DROP,
    OFPMC_ADD,
    OFPMC_DELETE,
    OFPMC_MODIFY,
    OFPMF_BURST,
    OFPMF_KBPS,
    OFPMF_PKTPS,
    OFPMF_STATS,
)
from weft.adapters.ovs.openflow.fields import unpack
from weft.domain.errors import DatapathFault

_METER_STRUCT = struct.Struct("!HHI")
_BAND_STRUCT = struct.Struct("!HHII4x")
_REQUEST_STRUCT = struct.Struct("!I4x")


class Meter(msgspec.Struct, frozen=True, gc=False):
    """A meter with one drop band: rate and burst in kilobits, or in packets."""

    number: int
    rate: int
    burst: int
    is_of_packets: bool = False

    def __str__(self) -> str:
        unit = "packets" if self.is_of_packets else "kbit"
        return f"{self.number} of {self.rate} {unit}/s with bursts of {self.burst} {unit}"


def add_meter(meter: Meter) -> bytes:
    """Encode OFPMC_ADD; the meter must not exist."""
    return _mod(OFPMC_ADD, meter)


def modify_meter(meter: Meter) -> bytes:
    """Encode OFPMC_MODIFY for an existing meter; flows that refer to it stay."""
    return _mod(OFPMC_MODIFY, meter)


def delete_meter(number: int) -> bytes:
    """Encode OFPMC_DELETE: deletes the meter and all flows that refer to it; idempotent."""
    return _METER_STRUCT.pack(OFPMC_DELETE, 0, number)


def _mod(command: int, meter: Meter) -> bytes:
    band = _BAND_STRUCT.pack(OFPMBT_DROP, _BAND_STRUCT.size, meter.rate, meter.burst)
    return _METER_STRUCT.pack(command, _flags(meter), meter.number) + band


def _flags(meter: Meter) -> int:
    return (OFPMF_PKTPS if meter.is_of_packets else OFPMF_KBPS) | OFPMF_BURST | OFPMF_STATS


def meters_request() -> bytes:
    """Encode a request for all meters."""
    return _REQUEST_STRUCT.pack(OFPM_ALL)


def decode_meters(data: bytes) -> Iterator[Meter]:
    """Decode one multipart reply, without the switch's own meters; one that we cannot have written has rate 0."""
    at = 0
    while at < len(data):
        length, flags, number = unpack(_METER_STRUCT, data, at)
        if length < _METER_STRUCT.size or at + length > len(data):
            raise DatapathFault("openflow: bad meter length")
        if number <= OFPM_MAX:
            yield _decode(data[at : at + length], flags=flags, number=number)
        at += length


def _decode(entry: bytes, *, flags: int, number: int) -> Meter:
    if len(entry) == _METER_STRUCT.size + _BAND_STRUCT.size:
        kind, _, rate, burst = unpack(_BAND_STRUCT, entry, _METER_STRUCT.size)
        found = Meter(number, rate, burst, is_of_packets=bool(flags & OFPMF_PKTPS))
        if kind == OFPMBT_DROP and flags == _flags(found):
            return found
    return Meter(number, 0, 0)
