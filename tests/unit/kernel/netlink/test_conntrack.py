"""Patterns, and connections out of bytes; the lab has real ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address, parse_address
from weft.domain.errors import DatapathFault
from weft.kernel.netlink.codec import attributes, to_int
from weft.kernel.netlink.conntrack import Connection, Direction, Pattern, encode_filter, parse_connection


def at(text: str) -> Address:
    return parse_address(text, field="address")


ONE, TWO = at("10.0.0.1"), at("10.0.0.2")
TALK = Connection(
    original=Direction(source=ONE, destination=TWO, protocol=17, destination_port=53),
    reply=Direction(source=TWO, destination=ONE, protocol=17, destination_port=40000),
    handle=b"",
)


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        (Pattern(), True),
        (Pattern(original=Direction(source=ONE)), True),
        (Pattern(original=Direction(source=TWO)), False),
        (Pattern(reply=Direction(source=TWO)), True),
        (Pattern(original=Direction(source=ONE, destination=ONE)), False),
        (Pattern(original=Direction(protocol=17, destination_port=53)), True),
        (Pattern(original=Direction(protocol=6, destination_port=53)), False),
        (Pattern(original=Direction(destination_port=54)), False),
        (Pattern(original=Direction(source=ONE), reply=Direction(source=ONE)), False),
    ],
)
def test_what_fits(pattern: Pattern, fits: bool) -> None:
    assert pattern.matches(TALK) is fits


def test_the_kernel_is_told_which_parts_are_meant() -> None:
    """Flags by bit: source 1, destination 2, protocol 8, destination port 32."""
    pattern = Pattern(
        original=Direction(destination=TWO, protocol=17, destination_port=53), reply=Direction(source=TWO)
    )
    flags = attributes(attributes(encode_filter(pattern))[25])
    assert (to_int(flags[1]), to_int(flags[2])) == (2 | 8 | 32, 1)


@given(st.binary(max_size=120) | st.binary(max_size=100).map(lambda data: b"\x02\0\0\0" + data))
def test_any_bytes_are_a_connection_or_a_fault(payload: bytes) -> None:
    try:
        parse_connection(payload)
    except DatapathFault:
        return
