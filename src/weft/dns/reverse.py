"""Names of reverse lookups, and the addresses they stand for."""

from __future__ import annotations

from ipaddress import ip_network
from typing import NamedTuple

from weft.dns.wire import labels_of
from weft.domain.addresses import BITS
from weft.domain.errors import Invalid

# Family, how many bits a label stands for, and the base in which it is written.
_DOMAINS = {(b"in-addr", b"arpa"): (4, 8, 10), (b"ip6", b"arpa"): (6, 4, 16)}


class Prefix(NamedTuple):
    """Addresses that begin alike."""

    family: int
    base: int
    length: int

    def lies_in(self, other: Prefix) -> bool:
        return (
            self.family == other.family
            and self.length >= other.length
            and (self.base ^ other.base) >> (BITS[self.family] - other.length) == 0
        )


def parse_prefix(text: str) -> Prefix:
    """A subnet from its text, or `Invalid`."""
    try:
        network = ip_network(text)
    except ValueError as error:
        raise Invalid(f"{text[:80]!r} is not a subnet") from error
    return Prefix(network.version, int(network.network_address), network.prefixlen)


def reverse_prefix(name: bytes) -> Prefix | None:
    """What a name stands for, in whole or in part; None when it is no reverse name, or none that can be."""
    *labels, second, first = [b"", b"", *labels_of(name)]
    if (second, first) not in _DOMAINS:
        return None
    family, width, base = _DOMAINS[second, first]
    number = length = 0
    for label in reversed(labels[2:]):
        if not label.isalnum() or len(label) > 3 or length == BITS[family]:
            return None
        try:
            part = int(label, base)
        except ValueError:
            return None
        if part >> width:
            return None
        number, length = number << width | part, length + width
    return Prefix(family, number << (BITS[family] - length), length)
