"""The framing, byte by byte, and against whatever bytes may come."""

from __future__ import annotations

import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.domain.addresses import Address, parse_address
from weft.domain.errors import DatapathFault
from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import Message, Request
from weft.kernel.uapi.netlink import NLM_F_ACK, NLM_F_CREATE, NLM_F_REQUEST

little_endian = pytest.mark.skipif(sys.byteorder != "little", reason="the bytes are written down for this order")


@little_endian
def test_a_request_byte_by_byte() -> None:
    request = Request(16, NLM_F_CREATE, codec.u32(4, 1450), "create", "eth0")
    assert request.encode(sequence=7, flags=NLM_F_ACK) == bytes.fromhex(
        "18000000 1000 0504 07000000 00000000 0800 0400 aa050000"
    )
    assert str(request) == "create eth0"


@little_endian
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (codec.attribute(1, b""), "0400 0100"),
        (codec.attribute(1, b"a"), "0500 0100 61000000"),
        (codec.attribute(1, b"abcd"), "0800 0100 61626364"),
        (codec.u8(2, 255), "0500 0200 ff000000"),
        (codec.u32(2, 1), "0800 0200 01000000"),
        (codec.be16(2, 1), "0600 0200 00010000"),
        (codec.be32(2, 1), "0800 0200 00000001"),
        (codec.be32(2, -3), "0800 0200 fffffffd"),
        (codec.text(3, "lo"), "0700 0300 6c6f0000"),
        (codec.mac(1, "02:03:04:05:06:07"), "0a00 0100 020304050607 0000"),
        (codec.nest(18, codec.u32(1, 2), codec.u32(3, 4)), "1400 1280 0800 0100 02000000 0800 0300 04000000"),
        (codec.nest(18), "0400 1280"),
    ],
)
def test_attributes_byte_by_byte(data: bytes, expected: str) -> None:
    assert data == bytes.fromhex(expected)


@pytest.mark.parametrize("text", ["0.0.0.0", "10.1.2.3", "255.255.255.255", "::", "fd00::1", "fe80::ffff:1"])
def test_addresses_there_and_back(text: str) -> None:
    value = parse_address(text, field="address")
    ((kind, data),) = codec.attribute_list(codec.address(5, value))
    assert (kind, codec.to_address(data)) == (5, value)


def test_what_is_absent_is_nothing() -> None:
    assert (codec.to_int(None), codec.to_int_be(None), codec.to_text(None), codec.to_mac(None)) == (0, 0, "", "")


def test_a_foreign_name_of_any_bytes_can_be_shown() -> None:
    assert codec.to_text(b"caf\xe9\0") == "caf\\xe9"


@pytest.mark.parametrize("data", [b"", b"\0\0\0", b"\0" * 5, b"\0" * 17])
def test_an_address_of_another_size_is_a_fault(data: bytes) -> None:
    with pytest.raises(DatapathFault):
        codec.to_address(data)


@pytest.mark.parametrize("number", [0, 1, 7, 28])
def test_another_family_is_a_fault(number: int) -> None:
    with pytest.raises(DatapathFault):
        codec.to_family(number)


NESTS = st.recursive(
    st.binary(max_size=40),
    lambda inner: st.lists(st.tuples(st.integers(0, 0x3FFF), inner), max_size=5),
    max_leaves=12,
)


def encode(tree: object) -> bytes:
    if isinstance(tree, bytes):
        return tree
    assert isinstance(tree, list)
    return b"".join(
        codec.attribute(kind, inner) if isinstance(inner, bytes) else codec.nest(kind, encode(inner))
        for kind, inner in tree
    )


def decode(data: bytes, shape: object) -> object:
    if isinstance(shape, bytes):
        return data
    assert isinstance(shape, list)
    found = codec.attribute_list(data)
    assert len(found) == len(shape)
    return [(kind, decode(inner, like)) for (kind, inner), (_, like) in zip(found, shape, strict=True)]


@given(st.lists(st.tuples(st.integers(0, 0x3FFF), NESTS), max_size=6))
def test_attributes_there_and_back(tree: list[tuple[int, object]]) -> None:
    assert decode(encode(tree), tree) == tree


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF), st.binary(max_size=50)), max_size=8))
def test_messages_there_and_back(sent: list[tuple[int, int, bytes]]) -> None:
    padded = [(kind, sequence, data + bytes(-len(data) % 4)) for kind, sequence, data in sent]
    datagram = b"".join(Request(kind, 0, data, "", "").encode(sequence=number) for kind, number, data in padded)
    assert list(codec.messages(datagram)) == [
        Message(kind, NLM_F_REQUEST, sequence, data) for kind, sequence, data in padded
    ]


@given(st.binary(max_size=200))
def test_any_bytes_are_messages_or_a_fault(data: bytes) -> None:
    try:
        found = list(codec.messages(data))
    except DatapathFault:
        return
    assert sum(16 + len(message.payload) for message in found) <= len(data)


@given(st.binary(max_size=200), st.integers(0, 20))
def test_any_bytes_are_attributes_or_a_fault(data: bytes, offset: int) -> None:
    try:
        found = codec.attribute_list(data, offset)
    except DatapathFault:
        return
    assert sum(4 + len(value) for _, value in found) <= len(data)


def test_a_message_that_claims_to_be_longer_than_its_datagram() -> None:
    with pytest.raises(DatapathFault):
        list(codec.messages(struct.pack("=IHHII", 17, 2, 0, 0, 0)))


def test_a_message_of_no_length_does_not_go_on_for_ever() -> None:
    with pytest.raises(DatapathFault):
        list(codec.messages(bytes(32)))
    with pytest.raises(DatapathFault):
        codec.attribute_list(bytes(32))


def test_addresses_know_their_family() -> None:
    assert codec.to_address(bytes(4)) == Address(4, 0)
    assert codec.to_address(bytes(16)) == Address(6, 0)
