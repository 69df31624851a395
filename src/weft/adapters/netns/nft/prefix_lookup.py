"""Ranges of addresses and ports as prefixes, which hash tables can hold, and the rules that look for them.

The kernel has sets for ranges. They take some 18 ms to lose one of 5,000, and change a moment after all else in a
transaction, so that a packet may meet a half of it. Hash tables do neither. A prefix is known there by the number in
its middle: 10.0.0.8 is 10.0.0.0/28, and says how long it is. What is of one number only has another map.

A rule asks for the prefix of one length, so there is one for each length in use: `PrefixLengthRule`. They come before the first
entry that needs them, and stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from weft.adapters.netns.nft.policy_chains import ADDRESS_ENDS, map_name, pair_key, ports_then
from weft.domain.addresses import BITS, Address
from weft.domain.policy.model.protocols import protocol_name
from weft.domain.policy.model.rules import Direction
from weft.kernel.netlink.nft_set import Element

_FAMILIES: Final = (4, 6)
_PORT_BITS: Final = 16
_ADDRESS_MAPS: Final = {f"where_{end}{family}": (end, family) for end in ADDRESS_ENDS for family in _FAMILIES}
_PORT_MAPS: Final = {
    map_name(direction, paired=paired, service="ports"): (direction, paired)
    for direction in Direction
    for paired in (True, False)
}
# The chains of these rules, each called like the map it asks (and a family).
WAY_CHAINS: Final = (*_ADDRESS_MAPS, *(f"{name}{family}" for name in _PORT_MAPS for family in _FAMILIES))


class PrefixLengthRule(NamedTuple):
    """A rule that asks a map for prefixes of one length: `free` is how many bits each leaves open."""

    name: str
    free: int
    # Of ports; 0 for addresses.
    protocol: int = 0


def prefixes(first: int, last: int, *, bits: int) -> Iterator[tuple[int, int]]:
    """First to last, both included, as first numbers of prefixes and how many bits each leaves open."""
    while first <= last:
        free = min((first & -first or 1 << bits).bit_length(), (last - first + 1).bit_length()) - 1
        yield first, free
        first += 1 << free


def prefix_key(first: int, free: int) -> int:
    """What a prefix that leaves some bits open is known by."""
    return first | 1 << free - 1


def ways_of(entries: Iterable[tuple[str, Element]]) -> set[PrefixLengthRule]:
    """The rules that find elements in their maps, where they need any of their own."""
    found = set()
    for name, element in entries:
        if name in _ADDRESS_MAPS:
            found.add(PrefixLengthRule(name, _free(int.from_bytes(element.key, "big"))))
        elif name in _PORT_MAPS:
            found.add(PrefixLengthRule(name, _free(int.from_bytes(element.key[-4:-2], "big")), element.key[-8]))
    return found


def _free(number: int) -> int:
    return (number & -number).bit_length()


def way_commands(ways: Iterable[PrefixLengthRule], *, table: str, anew: bool) -> str:
    """What adds rules, which must not be there yet; or makes all of them anew."""
    lines = [f"flush chain inet {table} {chain}" for chain in WAY_CHAINS] if anew else []
    lines += [f"add rule inet {table} {rule}" for way in sorted(ways) for rule in _rules(way)]
    return "".join(f"{line}\n" for line in lines)


def _rules(way: PrefixLengthRule) -> Iterator[str]:
    if way.name in _ADDRESS_MAPS:
        end, family = _ADDRESS_MAPS[way.name]
        into, address = ADDRESS_ENDS[end]
        whole, word = (1 << BITS[family]) - 1, "ip" if family == 4 else "ip6"
        mask, bit = (Address(family, number) for number in (whole >> way.free << way.free, prefix_key(0, way.free)))
        yield f"{way.name} {into} set {address.format(word=word)} & {mask} | {bit} map @{way.name} return"
        return
    direction, paired = _PORT_MAPS[way.name]
    mask_of_port = (1 << _PORT_BITS) - 1 >> way.free << way.free
    port = f"( ct reply proto-src & {mask_of_port:#x} | {prefix_key(0, way.free):#x} )"
    for family in _FAMILIES:
        yield (
            f"{way.name}{family} meta nfproto ipv{family} ct original protocol {protocol_name(way.protocol)} meta mark "
            f"set {pair_key(direction, paired=paired)} . ct original protocol . {port} map @{way.name} "
            f"goto {ports_then(direction, family)}"
        )
