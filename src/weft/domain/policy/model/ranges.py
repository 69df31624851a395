"""Sets of addresses as sorted ranges, v4 and v6 alike.

Every way to write addresses in a rule becomes ranges, which is also what interval sets in the kernel hold. A prefix of
IPv4-mapped IPv6 addresses is the IPv4 prefix it carries: no packet has such an address.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_right
from collections.abc import Iterable
from itertools import product

import msgspec

from weft.domain.addresses import BITS, Address, Range
from weft.domain.errors import Invalid

_CIDR = re.compile(r"(?P<address>[0-9A-Fa-f:.]+)/(?P<length>0|[1-9][0-9]{0,2})")
_MAPPED = Range(6, 0xFFFF << 32, (0xFFFF << 32) + 0xFFFFFFFF)
_PAST_THE_LAST = 1 << 128


class AddressSet(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """Addresses as disjoint, ascending ranges. Build it with `address_set`. The empty set contains nothing."""

    ranges: tuple[Range, ...] = ()

    def __contains__(self, address: Address) -> bool:
        index = bisect_right(self.ranges, (address.family, address.number, _PAST_THE_LAST)) - 1
        return index >= 0 and self.ranges[index].holds(address)

    def __str__(self) -> str:
        return ", ".join(map(range_text, self.ranges)) or "no address"


def range_text(span: Range) -> str:
    """A range in its shortest usual text: an address, a prefix, or first-last."""
    size = span.size
    if size == 1 or size & (size - 1) or span.first % size:
        return str(span)
    return f"{Address(span.family, span.first)}/{BITS[span.family] - size.bit_length() + 1}"


def address_set(ranges: Iterable[Range], *, without: Iterable[Range] = ()) -> AddressSet:
    """The union of `ranges`, less everything in `without`."""
    kept = _merge(ranges)
    for hole in without:
        kept = [piece for each in kept for piece in _subtract(each, hole)]
    return AddressSet(tuple(kept))


def overlap(left: Iterable[Range], right: Iterable[Range]) -> list[Range]:
    """The ranges of addresses that are in both."""
    return [
        Range(one.family, max(one.first, other.first), min(one.last, other.last))
        for one, other in product(left, right)
        if one.overlaps(other)
    ]


def _merge(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for each in sorted(ranges):
        if merged and merged[-1].family == each.family and each.first <= merged[-1].last + 1:
            merged[-1] = merged[-1]._replace(last=max(merged[-1].last, each.last))
        else:
            merged.append(each)
    return merged


def _subtract(each: Range, hole: Range) -> list[Range]:
    if not each.overlaps(hole):
        return [each]
    pieces = (each._replace(last=hole.first - 1), each._replace(first=hole.last + 1))
    return [piece for piece in pieces if piece.first <= piece.last]


def parse_cidr(text: str, *, field: str) -> Range:
    """The range of Kubernetes' `address/length`: bits right of the length are ignored, mapped addresses accepted."""
    match = _CIDR.fullmatch(text)
    if match is None:
        raise Invalid(f"{text[:80]!r} is not of the form address/length", field=field)
    try:
        address = ipaddress.ip_address(match["address"])
    except ValueError as error:
        raise Invalid(f"{text[:80]!r} is not a prefix: {error}", field=field) from error
    bits, length = BITS[address.version], int(match["length"])
    if length > bits:
        raise Invalid(f"{text!r} is not a prefix: the length is at most {bits}", field=field)
    size = 1 << (bits - length)
    first = int(address) & -size
    whole = Range(address.version, first, first + size - 1)
    if _MAPPED.covers(whole):
        return Range(4, whole.first - _MAPPED.first, whole.last - _MAPPED.first)
    return whole
