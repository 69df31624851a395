"""The frames between shim and agent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cni.wire import (
    HEADER_SIZE,
    MAX_BODY,
    Answer,
    Call,
    Unreadable,
    body_size,
    decode_answer,
    decode_call,
    encode_answer,
    encode_call,
)

VARIABLES = st.dictionaries(
    st.from_regex(r"CNI_[A-Z]+", fullmatch=True), st.text(st.characters(exclude_characters="\0", codec="utf-8"))
)


@given(environment=VARIABLES, stdin=st.binary(), milliseconds=st.integers(0, 2**32 - 1))
def test_a_call_arrives_as_it_was_made(environment: dict[str, str], stdin: bytes, milliseconds: int) -> None:
    call = Call(environment=environment, stdin=stdin, deadline=milliseconds / 1000)
    frame = encode_call(call)
    assert body_size(frame[:HEADER_SIZE]) == len(frame) - HEADER_SIZE
    assert decode_call(frame[HEADER_SIZE:]) == call


@given(exit_code=st.integers(0, 255), stdout=st.binary())
def test_an_answer_arrives_unchanged(exit_code: int, stdout: bytes) -> None:
    answer = Answer(exit_code=exit_code, stdout=stdout)
    frame = encode_answer(answer)
    assert body_size(frame[:HEADER_SIZE]) == len(frame) - HEADER_SIZE
    assert decode_answer(frame[HEADER_SIZE:]) == answer


def test_the_bytes_are_the_written_contract() -> None:
    """The example of docs/design/cni-wire.md."""
    call = Call(environment={"CNI_COMMAND": "ADD", "CNI_IFNAME": "eth0"}, stdin=b"{}", deadline=1.5)
    assert encode_call(call) == (
        b"WFT1\x00\x00\x00\x2a\x00\x00\x05\xdc\x00\x00\x00\x20CNI_COMMAND=ADD\x00CNI_IFNAME=eth0\x00{}"
    )
    assert encode_answer(Answer(exit_code=1, stdout=b"{}")) == b"WFT1\x00\x00\x00\x03\x01{}"


def test_bytes_that_are_no_text_survive() -> None:
    """A path is bytes to the kernel."""
    frame = b"WFT1\x00\x00\x00\x14\x00\x00\x00\x01\x00\x00\x00\x0cCNI_NETNS=\xff\x00"
    call = decode_call(frame[HEADER_SIZE:])
    assert call.environment == {"CNI_NETNS": "\udcff"}
    assert encode_call(call) == frame


@pytest.mark.parametrize("header", [b"", b"WFT1", b"WFT2\0\0\0\1", b"GET / HT", b"WFT1" + (MAX_BODY + 1).to_bytes(4)])
def test_a_strange_header_is_unreadable(header: bytes) -> None:
    with pytest.raises(Unreadable):
        body_size(header)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\0\0\0",
        b"\0\0\0\1\0\0\0\5CNI_",
        b"\0\0\0\1\xff\xff\xff\xff",
        b"\0\0\0\1\0\0\0\4CNI\0",
        b"\0\0\0\1\0\0\0\3=x\0",
        b"\0\0\0\1\0\0\0\5A=b\0C",
    ],
)
def test_a_strange_call_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable):
        decode_call(body)


@given(body=st.binary())
def test_any_bytes_are_a_call_or_unreadable(body: bytes) -> None:
    try:
        call = decode_call(body)
    except Unreadable:
        return
    assert call.stdin == body[len(body) - len(call.stdin) :]


def test_an_answer_has_an_exit_code() -> None:
    with pytest.raises(Unreadable):
        decode_answer(b"")
