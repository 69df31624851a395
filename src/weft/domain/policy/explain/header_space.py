"""Header-space equivalence classes of protocols, ports and addresses.

No rule distinguishes two members of a class, so the verdict for one of them is the verdict for all. Comparing two
states class by class therefore misses nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from weft.domain.addresses import BITS, Address, Range
from weft.domain.model import PodPort
from weft.domain.policy.model.protocols import ICMP, ICMPV6, MAX_PORT, PORTED, protocol_name
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import FlowRule

L = TypeVar("L")
R = TypeVar("R")


class L4Class(NamedTuple):
    """Ports `first` to `last` of a protocol; both are 0 if it has no ports. `name` may stand for many protocols."""

    name: str
    protocol: int
    first: int
    last: int


def portless_protocols(rules: Iterable[FlowRule]) -> frozenset[int]:
    """Return the protocols without ports, except ICMP, that some rule names."""
    named = {number for rule in rules for service in rule.services or () for number in service.protocols}
    return frozenset(named.difference(PORTED, (ICMP, ICMPV6)))


def l4_classes(
    rules: Iterable[FlowRule], *, ports: Iterable[PodPort], portless: frozenset[int], version: int
) -> list[L4Class]:
    """Return a partition of all protocols and ports in a fixed order, split at rule ranges and named ports.

    `portless` are the protocols without ports, except ICMP, that get a class of their own.
    """
    # Port 0 is left out: no connection uses it.
    cuts = {protocol: {1, MAX_PORT + 1} for protocol in PORTED}
    for service in (service for rule in rules for service in rule.services or ()):
        for protocol in service.protocols:
            if protocol in cuts:
                cuts[protocol] |= {max(service.first, 1), service.last + 1}
    # A rule with a port name may match a named port alone, so each gets a class of its own.
    for port in ports:
        if port.protocol in cuts:
            cuts[port.protocol] |= {port.port, port.port + 1}
    # Any protocol that no rule names can represent all of them; 255 is reserved by IANA, so it is the first choice.
    other = next(number for number in range(255, -1, -1) if number not in {*cuts, *portless, ICMP, ICMPV6})
    return [
        L4Class("icmp", ICMP if version == 4 else ICMPV6, 0, 0),
        *(L4Class(protocol_name(protocol), protocol, 0, 0) for protocol in sorted(portless)),
        *(
            L4Class(protocol_name(protocol), protocol, first, after - 1)
            for protocol, edges in cuts.items()
            for first, after in pairwise(sorted(edges))
        ),
        L4Class("other protocols", other, 0, 0),
    ]


def common_refinement(
    left: Sequence[tuple[L4Class, L]], right: Sequence[tuple[L4Class, R]]
) -> Iterator[tuple[L4Class, L, R]]:
    """Yield the common refinement of two partitions: every class with its value in each of them."""
    # Both partitions list the same protocols in the same order, so one merge pass over the last ports is enough.
    left_index, right_index = 0, 0
    while left_index < len(left):
        (left_class, left_value), (right_class, right_value) = left[left_index], right[right_index]
        last = min(left_class.last, right_class.last)
        refined = left_class._replace(first=max(left_class.first, right_class.first), last=last)
        yield refined, left_value, right_value
        left_index += left_class.last == last
        right_index += right_class.last == last


def format_l4_classes(classes: Iterable[L4Class]) -> tuple[str, ...]:
    """Format classes as `tcp/1-79` or `icmp`, with adjacent ones merged."""
    merged: list[L4Class] = []
    for l4_class in classes:
        if merged and merged[-1].name == l4_class.name and merged[-1].last + 1 == l4_class.first:
            merged[-1] = merged[-1]._replace(last=l4_class.last)
        else:
            merged.append(l4_class)
    return tuple(map(_format, merged))


def _format(l4_class: L4Class) -> str:
    first, last = l4_class.first, l4_class.last
    if (first, last) in ((0, 0), (1, MAX_PORT)):
        return l4_class.name
    return f"{l4_class.name}/{first}" if first == last else f"{l4_class.name}/{first}-{last}"


class AddressClasses:
    """A partition of the IPv4 and IPv6 address space, split at the bounds of every range in some sets."""

    def __init__(self, sets: Iterable[AddressSet]) -> None:
        cuts: dict[int, set[int]] = {4: {0}, 6: {0}}
        for span in (span for addresses in sets for span in addresses.ranges):
            cuts[span.family] |= {span.first, span.last + 1}
        self._cuts = {version: sorted(edges) for version, edges in cuts.items()}

    def class_of(self, address: Address) -> tuple[int, int]:
        """Return a key of the class that contains the address."""
        return address.family, bisect_right(self._cuts[address.family], address.number)

    def ranges(self, version: int) -> list[Range]:
        """Return the classes of an IP version, ascending."""
        end = 1 << BITS[version]
        # A range up to the last address puts a cut at the very end; it must not open an empty class.
        edges = [*(cut for cut in self._cuts[version] if cut < end), end]
        return [Range(version, first, after - 1) for first, after in pairwise(edges)]
