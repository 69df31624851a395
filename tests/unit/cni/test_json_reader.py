"""JSON read member by member."""

from __future__ import annotations

import pytest

from weft.cni.errors import CniError, Code
from weft.cni.json_reader import Document, decode_json


@pytest.mark.parametrize(
    "text", [b"", b"{", b"NaN", b"[Infinity]", b'"\xff"', '{"a":1}'.encode("utf-16"), b"[" * 99_999]
)
def test_what_is_not_json_in_utf8_is_code_6(text: bytes) -> None:
    """C-013."""
    with pytest.raises(CniError) as refused:
        decode_json(text)
    assert refused.value.code == Code.NOT_DECODED


def test_null_and_absent_are_the_same() -> None:
    document = Document({"a": None})
    assert "a" not in document
    assert (document.text("a"), document.number("a"), document.texts("a"), document.children("a")) == ("", None, (), ())
    assert (dict(document.mapping("a")), document.child("a").raw("b")) == ({}, None)


def test_zero_and_empty_are_there() -> None:
    document = Document({"a": 0, "b": []})
    assert "a" in document
    assert "b" in document
    assert document.number("a") == 0


def test_a_fault_is_named_by_its_place() -> None:
    document = Document({"a": {"b": [{}, {"c": 7}]}})
    inner = document.child("a").children("b")[1]
    with pytest.raises(CniError, match=r"a\.b\[1\]\.c must be a string, not 7") as refused:
        inner.text("c")
    assert refused.value.code == Code.BAD_CONFIG


def test_names_may_be_read_in_any_case() -> None:
    """cni 5: Go writes `HostPort`."""
    assert Document({"HostPort": 80}).in_any_case().number("hostport") == 80
