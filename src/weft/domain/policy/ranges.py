"""Sets of addresses as sorted ranges, v4 and v6 alike.

Every way to write addresses (a prefix, a prefix with exceptions, a span of last octets) becomes ranges, which is also
what interval sets in the kernel hold. An IPv4-mapped IPv6 address is the IPv4 address it carries: it never appears as
such in a packet. Zones are refused: a zone names an interface, which means nothing in a rule for many machines.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, summarize_address_range
from itertools import product
from typing import NamedTuple

import msgspec

from weft.domain.errors import Invalid

Address = IPv4Address | IPv6Address

_BITS = {4: 32, 6: 128}
_MAPPED = 0xFFFF << 32
_CIDR = re.compile(r"(?P<address>[0-9A-Fa-f:.]+)/(?P<length>[0-9]{1,3})")
_SPAN = re.compile(r"(?P<head>[0-9.]+\.)(?P<first>[0-9]{1,3})-(?P<last>[0-9]{1,3})(?:/(?P<length>[0-9]{1,2}))?")
_SUBNET_RANGE = re.compile(r"(?P<address>[0-9.]+)-[0-9.]+/(?P<length>[0-9]{1,2})")


class AddressRange(NamedTuple):
    """All addresses of one family from `first` to `last`, both included, as numbers."""

    version: int
    first: int
    last: int

    @property
    def start(self) -> Address:
        """The first address."""
        return _address(self.version, self.first)

    def __str__(self) -> str:
        if self.first == self.last:
            return str(self.start)
        end = _address(self.version, self.last)
        networks = list(summarize_address_range(self.start, end))
        return str(networks[0]) if len(networks) == 1 else f"{self.start}-{end}"


class AddressSet(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """Addresses as disjoint, ascending ranges. Build it with `address_set`. The empty set contains nothing."""

    ranges: tuple[AddressRange, ...] = ()

    def __contains__(self, address: Address) -> bool:
        number = int(address)
        index = bisect_right(self.ranges, (address.version, number, _LAST)) - 1
        if index < 0:
            return False
        version, _, last = self.ranges[index]
        return version == address.version and number <= last

    def __str__(self) -> str:
        return ", ".join(map(str, self.ranges)) or "no address"


_LAST = 1 << 128
"""Greater than every address, so that a search by first address finds the range that starts with it."""


def address_set(ranges: Iterable[AddressRange], *, without: Iterable[AddressRange] = ()) -> AddressSet:
    """The union of `ranges`, less everything in `without`."""
    kept = _merge(ranges)
    for hole in without:
        kept = [piece for each in kept for piece in _subtract(each, hole)]
    return AddressSet(tuple(kept))


def overlap(left: Iterable[AddressRange], right: Iterable[AddressRange]) -> list[AddressRange]:
    """The ranges of addresses that are in both."""
    return [
        AddressRange(one.version, max(one.first, other.first), min(one.last, other.last))
        for one, other in product(left, right)
        if one.version == other.version and max(one.first, other.first) <= min(one.last, other.last)
    ]


def _merge(ranges: Iterable[AddressRange]) -> list[AddressRange]:
    merged: list[AddressRange] = []
    for each in sorted(ranges):
        if merged and merged[-1].version == each.version and each.first <= merged[-1].last + 1:
            merged[-1] = merged[-1]._replace(last=max(merged[-1].last, each.last))
        else:
            merged.append(each)
    return merged


def _subtract(each: AddressRange, hole: AddressRange) -> list[AddressRange]:
    if each.version != hole.version or hole.last < each.first or each.last < hole.first:
        return [each]
    pieces = [each._replace(last=hole.first - 1), each._replace(first=hole.last + 1)]
    return [piece for piece in pieces if piece.first <= piece.last]


def parse_address(text: str, *, field: str) -> Address:
    """One address, or `Invalid`. No zone; an IPv4-mapped address becomes the IPv4 address."""
    try:
        if "%" in text:
            raise ValueError("a zone is not allowed")
        address = ip_address(text)
    except ValueError as error:
        raise Invalid(f"{text!r} is not an IP address: {error}", field=field) from error
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def parse_cidr(text: str, *, field: str) -> AddressRange:
    """The range of `address/length`; bits right of the length are ignored, as Kubernetes does."""
    match = _CIDR.fullmatch(text)
    if match is None:
        raise Invalid(f"{text!r} is not of the form address/length", field=field)
    try:
        address = ip_address(match["address"])
    except ValueError as error:
        raise Invalid(f"{text!r} is not a prefix: {error}", field=field) from error
    bits, length = _BITS[address.version], int(match["length"])
    if length > bits:
        raise Invalid(f"{text!r} is not a prefix: a length is at most {bits}", field=field)
    size = 1 << (bits - length)
    first = int(address) & -size
    last = first + size - 1
    if address.version == 6 and first >= _MAPPED and last <= _MAPPED + 0xFFFFFFFF:
        return AddressRange(4, first - _MAPPED, last - _MAPPED)
    return AddressRange(address.version, first, last)


def parse_span(text: str, *, field: str) -> AddressRange:
    """Contiv's address of a rule: one address, a prefix, or `10.1.1.5-20[/24]`, a span of last octets; v6 as well."""
    if span := _SPAN.fullmatch(text):
        first = parse_address(f"{span['head']}{span['first']}", field=field)
        last = parse_address(f"{span['head']}{span['last']}", field=field)
        spanned = AddressRange(4, int(first), int(last))
        if spanned.last < spanned.first:
            raise Invalid(f"{text!r} is reversed: the last octet is smaller than the first", field=field)
        if span["length"]:
            prefix = parse_cidr(f"{first}/{span['length']}", field=field)
            if not prefix.first <= spanned.first <= spanned.last <= prefix.last:
                raise Invalid(f"{text!r} leaves its own prefix", field=field)
        return spanned
    if "/" in text:
        return parse_cidr(text, field=field)
    return single(parse_address(text, field=field))


def parse_subnet(text: str, *, field: str) -> AddressRange:
    """The whole subnet of a network, also where the network hands out only a part (`10.1.1.5-10.1.1.20/24`)."""
    if match := _SUBNET_RANGE.fullmatch(text):
        return parse_cidr(f"{match['address']}/{match['length']}", field=field)
    return parse_cidr(text, field=field)


def single(address: Address) -> AddressRange:
    """The range that holds this address alone."""
    return AddressRange(address.version, int(address), int(address))


def _address(version: int, number: int) -> Address:
    return IPv4Address(number) if version == 4 else IPv6Address(number)
