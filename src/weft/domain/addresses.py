"""Addresses, subnets and ranges of IPv4 and IPv6, as integers with a family. The only parser of address text."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import NamedTuple

from weft.domain.errors import Invalid

# A table of the 256 valid texts parses octets faster than int(), and rejects leading zeros and signs.
_OCTETS = {str(number): number for number in range(256)}
_LENGTH = re.compile(r"0|[1-9]\d{0,2}", re.ASCII)

# By family.
BITS = {4: 32, 6: 128}


class Address(NamedTuple):
    """One address."""

    family: int
    number: int

    def __str__(self) -> str:
        return format_address(self.family, self.number)


class Range(NamedTuple):
    """A range of one family; first and last are included."""

    family: int
    first: int
    last: int

    def holds(self, address: Address) -> bool:
        return address.family == self.family and self.first <= address.number <= self.last

    def overlaps(self, other: Range) -> bool:
        return self.family == other.family and self.first <= other.last and other.first <= self.last

    def covers(self, other: Range) -> bool:
        return self.family == other.family and self.first <= other.first and other.last <= self.last

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        first = format_address(self.family, self.first)
        return first if self.first == self.last else f"{first}-{format_address(self.family, self.last)}"


class Subnet(NamedTuple):
    """A prefix, and the span of it that may be allocated; narrower than the prefix for `first-last/length`."""

    family: int
    base: int
    length: int
    span: Range

    @property
    def whole(self) -> Range:
        return Range(self.family, self.base, self.base + (1 << (BITS[self.family] - self.length)) - 1)

    @property
    def usable(self) -> Range:
        """The span without the network address and, in IPv4, the broadcast address; may be empty (`size` 0)."""
        whole = self.whole
        last = whole.last - 1 if self.family == 4 else whole.last
        return Range(self.family, max(self.span.first, whole.first + 1), min(self.span.last, last))

    def __str__(self) -> str:
        whole = self.whole
        if self.span == whole:
            return f"{format_address(self.family, self.base)}/{self.length}"
        first, last = (format_address(self.family, number) for number in (self.span.first, self.span.last))
        return f"{first}-{last}/{self.length}"


def format_address(family: int, number: int) -> str:
    """The address in its canonical text (RFC 5952 for IPv6)."""
    if family == 4:
        return f"{number >> 24}.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
    return str(ipaddress.IPv6Address(number))


def parse_address(text: str, *, field: str, family: int = 0) -> Address:
    """Parse an address of the family (0: either); `Invalid` for leading zeros, a zone or an IPv4-mapped address."""
    try:
        address = parse_dotted_quad(text) or _parse_v6(text)
    except ValueError as error:
        raise Invalid(f"{field} {text[:80]!r} is not an address", field=field) from error
    if family and address.family != family:
        raise Invalid(f"{field} {text!r} is not an IPv{family} address", field=field)
    return address


def parse_dotted_quad(text: str) -> Address | None:
    """Parse an IPv4 address; None if the text is none."""
    try:
        first, second, third, fourth = text.split(".", 4)
        return Address(4, _OCTETS[first] << 24 | _OCTETS[second] << 16 | _OCTETS[third] << 8 | _OCTETS[fourth])
    except (KeyError, ValueError):
        return None


def _parse_v6(text: str) -> Address:
    parsed = ipaddress.IPv6Address(text)
    # A mapped address would be a second spelling of an IPv4 address, and could evade a policy on it.
    if parsed.scope_id or parsed.ipv4_mapped:
        raise ValueError("a zone or an IPv4-mapped address is not allowed")
    return Address(6, int(parsed))


def parse_range(text: str, *, field: str, family: int = 0) -> Range:
    """Parse `first-last` in ascending order, or a single address (W20)."""
    first_text, dash, last_text = text.partition("-")
    first = parse_address(first_text, field=field, family=family)
    last = parse_address(last_text, field=field, family=first.family) if dash else first
    if last.number < first.number:
        raise Invalid(f"{field} {text!r} runs backwards: put the lower address first", field=field)
    return Range(first.family, first.number, last.number)


def parse_subnet(text: str, *, field: str, family: int, shortest: int, longest: int) -> Subnet:
    """Parse `address/length` or `first-last/length`; host bits are cleared, as in Contiv."""
    span_text, slash, length_text = text.rpartition("/")
    if not slash or not _LENGTH.fullmatch(length_text):
        raise Invalid(f"{field} {text[:100]!r} is not a subnet: write address/length or first-last/length", field=field)
    length = int(length_text)
    if not shortest <= length <= longest:
        raise Invalid(f"{field} {text!r}: the prefix length must be {shortest} to {longest}", field=field)
    span = parse_range(span_text, field=field, family=family)
    # Leading ones: 2^bits - 2^(bits - length).
    mask = (1 << BITS[family]) - (1 << (BITS[family] - length))
    base = span.first & mask
    subnet = Subnet(family, base, length, span)
    if not subnet.whole.covers(span):
        raise Invalid(f"{field} {text!r}: the range does not fit into one /{length}", field=field)
    return subnet if "-" in span_text else subnet._replace(span=subnet.whole)


def parse_prefix_or_range(text: str, *, field: str) -> Range:
    """Parse `address/length`, `first-last` or a single address, of either family."""
    if "/" not in text:
        return parse_range(text, field=field)
    # A colon occurs in IPv6 only.
    family = 6 if ":" in text else 4
    return parse_subnet(text, field=field, family=family, shortest=0, longest=BITS[family]).span


def parse_subnet_v4(text: str, *, field: str = "subnet") -> Subnet:
    """A network's v4 subnet: /8 to /31."""
    return parse_subnet(text, field=field, family=4, shortest=8, longest=31)


def parse_subnet_v6(text: str, *, field: str = "ipv6Subnet") -> Subnet:
    """A network's v6 subnet: every length from /16 to /127 (W19)."""
    return parse_subnet(text, field=field, family=6, shortest=16, longest=127)


def range_to_prefixes(first: int, last: int, *, bits: int) -> Iterator[tuple[int, int]]:
    """Split a range, both ends included, into the fewest prefixes: the base and the host bits of each."""
    while first <= last:
        # The largest block that is aligned at `first` and does not reach beyond `last`. Zero is aligned to every size.
        host_bits = min((first & -first or 1 << bits).bit_length(), (last - first + 1).bit_length()) - 1
        yield first, host_bits
        first += 1 << host_bits


def mac_of(address: Address) -> str:
    """The MAC of an endpoint: `02:02:` and the last four bytes of its address (contiv 5)."""
    # Bit 0x02 of the first byte marks a locally administered address.
    return "02:02:" + ":".join(f"{byte:02x}" for byte in (address.number & 0xFFFFFFFF).to_bytes(4, "big"))


def address_hex(address: Address) -> str:
    """An address in a store key: hex of fixed width, so that key order is address order."""
    return f"{address.number:0{BITS[address.family] // 4}x}"


def address_from_hex(text: str) -> Address:
    """The inverse of `address_hex`; ValueError for other texts."""
    if len(text) not in (8, 32):
        raise ValueError(f"{text[:40]!r} has not the length of an address in a store key")
    # Round trip: int() also accepts signs, underscores and other digits, which would be second spellings of a key.
    address = Address(4 if len(text) == 8 else 6, int(text, 16))
    if address_hex(address) != text:
        raise ValueError(f"{text!r} is not the form of an address in a store key")
    return address
