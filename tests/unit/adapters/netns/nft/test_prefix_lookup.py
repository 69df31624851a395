"""Ranges as prefixes and the rules that look for them. The lab has the kernel for a judge."""

from __future__ import annotations

import ipaddress

from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.netns.nft.prefix_lookup import PrefixLengthRule, prefix_key, prefixes, way_commands, ways_of
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol

PORTS = st.integers(0, 65535)


@given(st.tuples(PORTS, PORTS).map(sorted))
def test_prefixes_hold_a_range_and_nothing_else(span: list[int]) -> None:
    first, last = span
    found = [number for base, free in prefixes(first, last, bits=16) for number in range(base, base + (1 << free))]
    assert found == list(range(first, last + 1))


@given(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).map(sorted))
def test_prefixes_are_as_few_as_can_be(span: list[int]) -> None:
    judged = ipaddress.summarize_address_range(*map(ipaddress.IPv4Address, span))
    assert [(int(each.network_address), 32 - each.prefixlen) for each in judged] == list(prefixes(*span, bits=32))


def test_everything_is_one_prefix() -> None:
    assert list(prefixes(0, 2**128 - 1, bits=128)) == [(0, 128)]
    assert list(prefixes(7, 7, bits=16)) == [(7, 0)]


@given(st.sets(st.tuples(st.integers(0, 2**16 - 1), st.integers(1, 16)), min_size=2))
def test_no_two_prefixes_have_the_same_middle(seeds: set[tuple[int, int]]) -> None:
    different = {(number >> free << free, free) for number, free in seeds}
    assert len({prefix_key(*each) for each in different}) == len(different)


def test_each_length_in_use_has_a_way() -> None:
    ports = [
        ("egress_any_ports", Element(key=key(mark(1), protocol(17), port(number)), value=mark(9))) for number in (1, 6)
    ]
    places = [("where_asks4", Element(key=bytes((10, 0, 0, last)))) for last in (8, 24, 4)]
    others = [("who_asks4", Element(key=bytes((10, 0, 0, 8)))), ("egress_any_all", Element(key=mark(8)))]
    assert ways_of([*ports, *places, *others]) == {
        PrefixLengthRule("egress_any_ports", 1, 17),
        PrefixLengthRule("egress_any_ports", 2, 17),
        PrefixLengthRule("where_asks4", 4),
        PrefixLengthRule("where_asks4", 3),
    }


def test_ways_are_added_to_those_that_stand_or_made_anew() -> None:
    way = PrefixLengthRule("where_answers4", 4)
    rule = "meta priority set ct reply ip saddr & 255.255.255.240 | 0.0.0.8 map @where_answers4 return"
    assert way_commands([way], table="weft", anew=False) == f"add rule inet weft where_answers4 {rule}\n"
    anew = way_commands([way], table="weft", anew=True).splitlines()
    assert "flush chain inet weft where_answers4" in anew
    assert "flush chain inet weft ingress_pair_ports6" in anew
    assert anew[-1] == f"add rule inet weft where_answers4 {rule}"
