"""Longest-prefix lookup in hash maps: ranges of addresses and ports as prefixes, and one rule per prefix length.

The kernel has interval sets. Deleting one of 5,000 ranges takes them some 18 ms, and they change a moment after the
rest of a transaction, so a packet may see half of it. Hash maps do neither. The key of a prefix is the number in its
middle, which encodes base and length: 10.0.0.8 is 10.0.0.0/28. Single numbers are in maps of their own.

A rule looks up the prefix of one length, so there is one `PrefixLengthRule` for each length in use. It is added before
the first entry that needs it, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from weft.adapters.netns.nft.policy_chains import IDENTITY_LOOKUPS, identity_key, policy_map_name, verdict_chain
from weft.domain.addresses import BITS, Address
from weft.domain.policy.model.protocols import protocol_name
from weft.domain.policy.model.rules import Direction
from weft.kernel.netlink.nft_set import Element

CHAINS: Final = {
    "cidr_identity_src{4,6}": "look up the source identity by prefix, one rule per prefix length in use",
    "cidr_identity_dst{4,6}": "the same for the destination identity",
    **{
        f"{policy_map_name(direction, paired=paired, l4='ports')}{{4,6}}": f"look up the {direction} verdict by prefix "
        "of ports, one rule per prefix length and protocol in use"
        for direction in Direction
        for paired in (True, False)
    },
}

_FAMILIES: Final = (4, 6)
_PORT_BITS: Final = 16
_ADDRESS_MAPS: Final = {
    f"cidr_identity_{end}{family}": (end, family) for end in IDENTITY_LOOKUPS for family in _FAMILIES
}
_PORT_MAPS: Final = {
    policy_map_name(direction, paired=paired, l4="ports"): (direction, paired)
    for direction in Direction
    for paired in (True, False)
}
# The chains of these rules. Each has the name of its map; the port chains have a family too, which nft needs to know
# before it accepts a port.
PREFIX_LOOKUP_CHAINS: Final = (*_ADDRESS_MAPS, *(f"{name}{family}" for name in _PORT_MAPS for family in _FAMILIES))


class PrefixLengthRule(NamedTuple):
    """A rule that looks up prefixes of one length in a map: `host_bits` is the number of bits after the prefix."""

    name: str
    host_bits: int
    # The protocol of ports; 0 for addresses.
    protocol: int = 0


def prefix_key(first: int, host_bits: int) -> int:
    """Return the map key of a prefix: its middle. The lowest set bit gives the length, so no two prefixes collide."""
    return first | 1 << host_bits - 1


def prefix_length_rules(entries: Iterable[tuple[str, Element]]) -> set[PrefixLengthRule]:
    """Return the rules that the lookup of these entries needs."""
    rules = set()
    for name, element in entries:
        if name in _ADDRESS_MAPS:
            rules.add(PrefixLengthRule(name, _host_bits(int.from_bytes(element.key, "big"))))
        elif name in _PORT_MAPS:
            # The key ends with the protocol and the port, each padded to four bytes.
            port_number = int.from_bytes(element.key[-4:-2], "big")
            rules.add(PrefixLengthRule(name, _host_bits(port_number), element.key[-8]))
    return rules


def _host_bits(number: int) -> int:
    return (number & -number).bit_length()


def prefix_length_commands(rules: Iterable[PrefixLengthRule], *, table: str, rebuild: bool) -> str:
    """Return commands that add rules, which must not exist yet, or that replace all of them."""
    lines = [f"flush chain inet {table} {chain}" for chain in PREFIX_LOOKUP_CHAINS] if rebuild else []
    lines += [f"add rule inet {table} {text}" for rule in sorted(rules) for text in _rule_texts(rule)]
    return "".join(f"{line}\n" for line in lines)


def _rule_texts(rule: PrefixLengthRule) -> Iterator[str]:
    name, host_bits = rule.name, rule.host_bits
    if name in _ADDRESS_MAPS:
        end, family = _ADDRESS_MAPS[name]
        register, address = IDENTITY_LOOKUPS[end]
        all_ones, ip = (1 << BITS[family]) - 1, "ip" if family == 4 else "ip6"
        mask, middle = (
            Address(family, number) for number in (all_ones >> host_bits << host_bits, prefix_key(0, host_bits))
        )
        yield f"{name} {register} set {address.format(ip=ip)} & {mask} | {middle} map @{name} return"
        return
    direction, paired = _PORT_MAPS[name]
    port_mask = (1 << _PORT_BITS) - 1 >> host_bits << host_bits
    port = f"( ct reply proto-src & {port_mask:#x} | {prefix_key(0, host_bits):#x} )"
    for family in _FAMILIES:
        yield (
            f"{name}{family} meta nfproto ipv{family} ct original protocol {protocol_name(rule.protocol)} meta mark "
            f"set {identity_key(direction, paired=paired)} . ct original protocol . {port} map @{name} "
            f"goto {verdict_chain(direction, family)}"
        )
