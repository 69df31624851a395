"""Keys and elements as bytes; the lab checks them with `nft`."""

from __future__ import annotations

import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.errors import DatapathFault
from weft.kernel.netlink import codec
from weft.kernel.netlink.nft_set import (
    Count,
    Element,
    SetName,
    Verdict,
    drop_elements,
    interface,
    key,
    mark,
    parse_counts,
    parse_elements,
    port,
    protocol,
    put_elements,
)
from weft.kernel.uapi.nf_tables import NFPROTO_INET

TARGET = SetName(NFPROTO_INET, "weft", "blocked")


def test_a_single_field_is_the_key_itself() -> None:
    assert key(port(80)) == b"\x00\x50"
    assert key(protocol(6)) == b"\x06"


def test_several_fields_are_padded_to_four_bytes_each() -> None:
    assert key(protocol(6), port(80), b"\x02\x02\x0a\x01\x00\x02") == bytes.fromhex(
        "06000000 00500000 02020a010002 0000"
    )


def test_fields() -> None:
    assert interface("wp1") == b"wp1" + bytes(13)
    assert int.from_bytes(mark(1), sys.byteorder) == 1


def test_dropping_asks_for_keys_only() -> None:
    """So that an element goes whatever its value is by now."""
    with_value = Element(key=port(80), value=mark(1))
    (request,) = drop_elements(TARGET, [with_value])
    assert list(parse_elements(request.payload)) == [Element(key=port(80))]
    assert str(request) == "delete elements of weft blocked"


def test_long_lists_are_cut_into_messages_that_fit() -> None:
    elements = [Element(key=number.to_bytes(4, "big")) for number in range(10_000)]
    requests = put_elements(TARGET, elements)
    assert 1 < len(requests) < 10
    assert all(len(request.payload) < 1 << 16 for request in requests)
    assert [element for request in requests for element in parse_elements(request.payload)] == elements


def test_no_elements_are_no_request() -> None:
    assert put_elements(TARGET, []) == drop_elements(TARGET, []) == []


KEYS = st.binary(min_size=1, max_size=40)
VERDICTS = st.builds(Verdict, st.integers(-5, 1), st.text("abcxyz_", max_size=20))
ELEMENTS = st.one_of(
    st.builds(Element, key=KEYS, value=st.just(b"") | KEYS),
    st.builds(Element, key=KEYS, verdict=VERDICTS),
)


@given(st.lists(ELEMENTS, max_size=20))
def test_elements_there_and_back(elements: list[Element]) -> None:
    found = [element for request in put_elements(TARGET, elements) for element in parse_elements(request.payload)]
    assert found == elements


@given(
    st.binary(max_size=120) | st.binary(max_size=100).map(lambda data: bytes(4) + codec.nest(3, codec.nest(1, data)))
)
def test_any_bytes_are_elements_or_a_fault(payload: bytes) -> None:
    try:
        list(parse_elements(payload))
    except DatapathFault:
        return


@pytest.mark.parametrize("number", [-1, 65536])
def test_a_number_that_does_not_fit_its_field_is_an_error_of_ours(number: int) -> None:
    with pytest.raises(OverflowError):
        port(number)


def counted(key: bytes, packets: int, octets: int, *, swapped: bool = False) -> bytes:
    """An element with a counter as the kernel writes it, or with its two numbers the other way round."""
    numbers = [codec.attribute(kind, number.to_bytes(8, "big")) for kind, number in ((1, octets), (2, packets))]
    counter = codec.attribute(1, b"counter\0") + codec.nest(2, *(reversed(numbers) if swapped else numbers))
    return codec.nest(1, codec.nest(1, codec.attribute(1, key)), codec.attribute(7, counter))


NUMBERS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize("size", [1, 2, 4, 6, 16, 40])
@given(data=st.data())
def test_counts_are_read_whatever_the_form_of_elements(size: int, data: st.DataObject) -> None:
    """Those that are all alike by a shorter way."""
    keys = st.binary(min_size=size, max_size=size)
    expected = data.draw(st.lists(st.tuples(keys, NUMBERS, NUMBERS), max_size=9))
    swapped = data.draw(st.sets(st.integers(0, 8)))
    elements = [counted(*each, swapped=place in swapped) for place, each in enumerate(expected)]
    found = parse_counts(bytes(4) + codec.nest(3, *elements))
    assert list(found) == [(key, Count(packets, octets)) for key, packets, octets in expected]


@given(st.binary(max_size=130).map(lambda data: bytes(4) + codec.nest(3, data)))
def test_any_bytes_are_counts_or_a_fault(payload: bytes) -> None:
    with suppress(DatapathFault):
        list(parse_counts(payload))
