"""Meters as messages: what is packed comes back, and noise is refused. The real switch judges it in tests/lab."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.ovs.openflow.meters import Meter, add_meter, decode_meters
from weft.domain.errors import DatapathFault

METERS = st.builds(
    Meter, st.integers(1, 0xFFFF), st.integers(1, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF), is_of_packets=st.booleans()
)


def told_by_switch(meter: Meter) -> bytes:
    """A meter as a switch tells it: as in the message that made it, with its length in place of the command."""
    body = add_meter(meter)
    return struct.pack("!H", len(body)) + body[2:]


@given(st.lists(METERS, max_size=5))
def test_what_is_put_comes_back(meters: list[Meter]) -> None:
    assert [*decode_meters(b"".join(map(told_by_switch, meters)))] == meters


def test_meters_of_the_switch_itself_are_left_out() -> None:
    assert [*decode_meters(told_by_switch(Meter(0xFFFFFFFD, 200, 100, is_of_packets=True)))] == []


def test_a_meter_of_another_form_is_like_none_of_ours() -> None:
    assert [*decode_meters(struct.pack("!HHI", 8, 1, 7))] == [Meter(7, 0, 0)]


def test_half_a_meter_is_refused() -> None:
    exact_mask = told_by_switch(Meter(1, 2, 3))
    for length in range(1, len(exact_mask)):
        with pytest.raises(DatapathFault):
            [*decode_meters(exact_mask[:length])]


def test_a_meter_is_told_in_words() -> None:
    assert str(Meter(4, 6292, 1573)) == "4 of 6292 kbit/s with bursts of 1573 kbit"
