"""Address sets as sorted ranges, for IPv4 and IPv6.

Every notation for addresses in a rule becomes ranges. A prefix of IPv4-mapped IPv6 addresses becomes the IPv4 prefix
inside it: no packet on the wire has an IPv4-mapped address.
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import product

import msgspec

from weft.domain.addresses import BITS, Address, Range, parse_dotted_quad
from weft.domain.errors import Invalid

_CIDR = re.compile(r"(?P<address>[0-9A-Fa-f:.]+)/(?P<length>0|[1-9][0-9]{0,2})")
# ::ffff:0:0/96, IPv4-mapped addresses (RFC 4291, 2.5.5.2).
_MAPPED = Range(6, 0xFFFF << 32, (0xFFFF << 32) + 0xFFFFFFFF)
# Greater than the last address of any range, so that a probe sorts after every range with the same first address.
_PAST_THE_LAST = 1 << 128


class AddressSet(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """Addresses as disjoint, ascending ranges. Build it with `address_set`."""

    ranges: tuple[Range, ...] = ()

    def __contains__(self, address: Address) -> bool:
        index = bisect_right(self.ranges, (address.family, address.number, _PAST_THE_LAST)) - 1
        return index >= 0 and self.ranges[index].holds(address)

    def __str__(self) -> str:
        return ", ".join(map(range_text, self.ranges)) or "no address"


def range_text(span: Range) -> str:
    """Format a range as short as possible: as an address, a prefix, or first-last."""
    size = span.size
    # A prefix is a power of two in size and aligned to it.
    if size == 1 or size & (size - 1) or span.first % size:
        return str(span)
    return f"{Address(span.family, span.first)}/{BITS[span.family] - size.bit_length() + 1}"


def address_set(ranges: Iterable[Range], *, without: Iterable[Range] = ()) -> AddressSet:
    """Return the union of `ranges` without everything in `without`."""
    return AddressSet(tuple(_subtract(_merge(ranges), _merge(without))))


def overlap(left: Iterable[Range], right: Iterable[Range]) -> list[Range]:
    """Return the pairwise intersections of two lists of ranges."""
    return [
        Range(one.family, max(one.first, other.first), min(one.last, other.last))
        for one, other in product(left, right)
        if one.overlaps(other)
    ]


def _merge(ranges: Iterable[Range]) -> list[Range]:
    merged: list[Range] = []
    for span in sorted(ranges):
        if merged and merged[-1].family == span.family and span.first <= merged[-1].last + 1:
            merged[-1] = merged[-1]._replace(last=max(merged[-1].last, span.last))
        else:
            merged.append(span)
    return merged


def _subtract(spans: list[Range], holes: list[Range]) -> Iterator[Range]:
    """Yield what is left of the spans; both lists are merged."""
    index = 0
    for span in spans:
        first = span.first
        # Both lists ascend, so one pass is enough: trying each hole on each span would cost their product.
        while index < len(holes) and (holes[index].family, holes[index].last) < (span.family, span.first):
            index += 1
        for position in range(index, len(holes)):
            hole = holes[position]
            if (hole.family, hole.first) > (span.family, span.last):
                break
            if hole.first > first:
                yield span._replace(first=first, last=hole.first - 1)
            first = hole.last + 1
        if first <= span.last:
            yield span._replace(first=first)


def parse_cidr(text: str, *, field: str) -> Range:
    """Return the range of a Kubernetes CIDR. Host bits are ignored, IPv4-mapped addresses are accepted."""
    match = _CIDR.fullmatch(text)
    if match is None:
        raise Invalid(f"{text[:80]!r} is not of the form address/length", field=field)
    try:
        # A policy may have tens of thousands of them, and `ipaddress` takes ten times as long for IPv4.
        family, number = parse_dotted_quad(match["address"]) or (6, int(ipaddress.IPv6Address(match["address"])))
    except ValueError as error:
        raise Invalid(f"{text[:80]!r} is not a prefix: {error}", field=field) from error
    bits, length = BITS[family], int(match["length"])
    if length > bits:
        raise Invalid(f"{text[:80]!r} is not a prefix: the length is at most {bits}", field=field)
    size = 1 << (bits - length)
    first = number & -size
    prefix = Range(family, first, first + size - 1)
    # Wider prefixes, such as ::/0, stay IPv6: they must not match IPv4 packets (CVE-2023-27594).
    if _MAPPED.covers(prefix):
        return Range(4, prefix.first - _MAPPED.first, prefix.last - _MAPPED.first)
    return prefix
