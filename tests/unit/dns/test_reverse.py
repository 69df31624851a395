"""Reverse names, whole and in part."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.dns.encode import encode_name
from weft.dns.reverse import Prefix, parse_prefix, reverse_prefix
from weft.domain.errors import Invalid


@given(st.ip_addresses())
def test_a_whole_name_is_its_address(address: object) -> None:
    parsed = ip_address(str(address))
    found = reverse_prefix(encode_name(parsed.reverse_pointer))
    assert found == Prefix(parsed.version, int(parsed), parsed.max_prefixlen)


@given(st.ip_addresses(), st.integers(1, 32), st.ip_addresses())
def test_lying_in_a_subnet_is_what_the_standard_library_says(one: object, length: int, other: object) -> None:
    address, base = ip_address(str(one)), ip_address(str(other))
    network = ip_network((base if length % 2 else address, length), strict=False)
    prefix = reverse_prefix(encode_name(address.reverse_pointer))
    assert prefix is not None
    assert prefix.lies_in(parse_prefix(str(network))) == (address in network)


def test_a_part_of_a_name_is_a_prefix() -> None:
    assert reverse_prefix(encode_name("1.10.in-addr.arpa")) == parse_prefix("10.1.0.0/16")
    assert reverse_prefix(encode_name("8.b.d.0.1.0.0.2.ip6.arpa")) == parse_prefix("2001:db8::/32")
    assert reverse_prefix(encode_name("in-addr.arpa")) == parse_prefix("0.0.0.0/0")
    assert not parse_prefix("10.0.0.0/8").lies_in(parse_prefix("10.1.0.0/16"))


@pytest.mark.parametrize(
    "name",
    [
        "arpa",
        "web",
        "x.in-addr.arpa",
        "256.in-addr.arpa",
        "1.2.3.4.5.in-addr.arpa",
        "10.ip6.arpa",
        "_b._udp.1.in-addr.arpa",
    ],
)
def test_other_names_stand_for_nothing(name: str) -> None:
    assert reverse_prefix(encode_name(name)) is None


def test_the_root_stands_for_nothing() -> None:
    assert reverse_prefix(b"\0") is None


def test_what_is_no_subnet_is_refused() -> None:
    with pytest.raises(Invalid):
        parse_prefix("10.0.0.1/8")
