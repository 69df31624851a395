"""Ranges as prefixes, and the rules that look them up. The lab tests run them in the kernel."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.netns.nft.prefix_lookup import (
    PrefixLengthRule,
    prefix_key,
    prefix_length_commands,
    prefix_length_rules,
)
from weft.kernel.netlink.nft_set import Element, key, mark, port, protocol


@given(st.sets(st.tuples(st.integers(0, 2**16 - 1), st.integers(1, 16)), min_size=2))
def test_no_two_prefixes_have_the_same_key(seeds: set[tuple[int, int]]) -> None:
    different = {(number >> free << free, free) for number, free in seeds}
    assert len({prefix_key(*each) for each in different}) == len(different)


def test_each_prefix_length_in_use_has_a_rule() -> None:
    ports = [
        ("egress_any_ports", Element(key=key(mark(1), protocol(17), port(number)), value=mark(9))) for number in (1, 6)
    ]
    places = [("cidr_identity_src4", Element(key=bytes((10, 0, 0, last)))) for last in (8, 24, 4)]
    others = [("ip_identity_src4", Element(key=bytes((10, 0, 0, 8)))), ("egress_any_all", Element(key=mark(8)))]
    assert prefix_length_rules([*ports, *places, *others]) == {
        PrefixLengthRule("egress_any_ports", 1, 17),
        PrefixLengthRule("egress_any_ports", 2, 17),
        PrefixLengthRule("cidr_identity_src4", 4),
        PrefixLengthRule("cidr_identity_src4", 3),
    }


def test_rules_are_added_or_all_replaced() -> None:
    wanted = PrefixLengthRule("cidr_identity_dst4", 4)
    rule = "meta priority set ct reply ip saddr & 255.255.255.240 | 0.0.0.8 map @cidr_identity_dst4 return"
    assert (
        prefix_length_commands([wanted], table="weft", rebuild=False)
        == f"add rule inet weft cidr_identity_dst4 {rule}\n"
    )
    rebuilt = prefix_length_commands([wanted], table="weft", rebuild=True).splitlines()
    assert "flush chain inet weft cidr_identity_dst4" in rebuilt
    assert "flush chain inet weft ingress_pair_ports6" in rebuilt
    assert rebuilt[-1] == f"add rule inet weft cidr_identity_dst4 {rule}"
