"""Address sets: membership, set operations, and text forms."""

from __future__ import annotations

from ipaddress import IPv6Network, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Range, parse_address
from weft.domain.errors import Invalid
from weft.domain.policy.model.ranges import AddressSet, address_set, overlap, parse_cidr, range_text

spans = st.builds(
    lambda family, first, size: Range(family, first, first + size),
    st.sampled_from([4, 6]),
    st.integers(0, 40),
    st.integers(0, 10),
)


def inside(addresses: AddressSet) -> set[tuple[int, int]]:
    return {(each.family, number) for each in addresses.ranges for number in range(each.first, each.last + 1)}


def numbers(ranges: list[Range]) -> set[tuple[int, int]]:
    return {(each.family, number) for each in ranges for number in range(each.first, each.last + 1)}


@given(st.lists(spans, max_size=6), st.lists(spans, max_size=4))
def test_union_and_difference(ranges: list[Range], without: list[Range]) -> None:
    addresses = address_set(ranges, without=without)
    assert inside(addresses) == numbers(ranges) - numbers(without)
    assert list(addresses.ranges) == sorted(addresses.ranges)


@given(st.lists(spans, max_size=4), st.lists(spans, max_size=4))
def test_overlap(left: list[Range], right: list[Range]) -> None:
    assert numbers(overlap(left, right)) == numbers(left) & numbers(right)


@given(st.lists(spans, max_size=6), st.sampled_from([4, 6]), st.integers(0, 55))
def test_membership(ranges: list[Range], family: int, number: int) -> None:
    address = parse_address(str(ip_address(number) if family == 4 else ip_address(number + (1 << 64))), field="f")
    moved = [each if each.family == 4 else Range(6, each.first + (1 << 64), each.last + (1 << 64)) for each in ranges]
    assert (address in address_set(moved)) is ((family, number) in numbers(ranges))


def test_the_empty_set_contains_nothing() -> None:
    """CVE-2025-64715: an empty set is not *any*."""
    assert parse_address("10.0.0.1", field="f") not in address_set([])
    assert parse_address("::1", field="f") not in address_set([])


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("10.1.2.0/24", "10.1.2.0", "10.1.2.255"),
        ("10.1.2.77/24", "10.1.2.0", "10.1.2.255"),
        ("0.0.0.0/0", "0.0.0.0", "255.255.255.255"),
        ("10.1.2.3/32", "10.1.2.3", "10.1.2.3"),
        ("fd00::/64", "fd00::", "fd00::ffff:ffff:ffff:ffff"),
        ("fd00::1/128", "fd00::1", "fd00::1"),
        ("::ffff:10.1.2.0/120", "10.1.2.0", "10.1.2.255"),
        ("::ffff:0:0/96", "0.0.0.0", "255.255.255.255"),
        ("::ffff:a01:203/128", "10.1.2.3", "10.1.2.3"),
    ],
)
def test_cidr(text: str, first: str, last: str) -> None:
    span = parse_cidr(text, field="cidr")
    low, high = parse_address(first, field="f"), parse_address(last, field="f")
    assert span == Range(low.family, low.number, high.number)


def test_a_v6_prefix_never_holds_v4() -> None:
    """CVE-2023-27594: families stay apart, even if a prefix is wider than all mapped addresses."""
    everything = address_set([parse_cidr("::/0", field="cidr")])
    assert parse_address("fd00::1", field="f") in everything
    assert parse_address("10.0.0.1", field="f") not in everything


@pytest.mark.parametrize(
    "text",
    [
        "10.1.2.3",
        "10.1.2.0/33",
        "10.1.2.0/-1",
        "10.1.2.0/24/24",
        "10.1.2.0/255.255.255.0",
        "10.01.2.0/24",
        "10.1.2/24",
        "fd00::/129",
        "fe80::%eth0/64",
        "fe80::/64%eth0",
        "10.1.2.0/024",
        "١٠.1.2.0/24",
        "",
        "/24",
    ],
)
def test_an_invalid_prefix_is_rejected(text: str) -> None:
    with pytest.raises(Invalid) as refusal:
        parse_cidr(text, field="spec.cidr")
    assert refusal.value.field == "spec.cidr"


@given(st.integers(0, (1 << 128) - 1), st.integers(0, 128))
def test_cidr_agrees_with_the_standard_library(number: int, length: int) -> None:
    text = f"{ip_address(number) if number >= 1 << 32 else ip_address(number + (1 << 64))}/{length}"
    network = ip_network(text, strict=False)
    assert isinstance(network, IPv6Network)
    if not network.subnet_of(IPv6Network("::ffff:0:0/96")):
        assert parse_cidr(text, field="f") == Range(6, int(network[0]), int(network[-1]))


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (Range(4, 0, (1 << 32) - 1), "0.0.0.0/0"),
        (Range(6, 0, (1 << 128) - 1), "::/0"),
        (Range(4, 0x0A000000, 0x0A0000FF), "10.0.0.0/24"),
        (Range(4, 0x0A000001, 0x0A000001), "10.0.0.1"),
        (Range(4, 0x0A000001, 0x0A000002), "10.0.0.1-10.0.0.2"),
        (Range(4, 0x0A000000, 0x0A000002), "10.0.0.0-10.0.0.2"),
    ],
)
def test_text(span: Range, text: str) -> None:
    assert range_text(span) == text
