"""Errors as runtimes read them."""

from __future__ import annotations

import json

import pytest

from weft.cni.errors import CniError, Code
from weft.cni.versions import SUPPORTED


@pytest.mark.parametrize("version", SUPPORTED)
def test_an_error_has_the_members_of_the_specification(version: str) -> None:
    """C-002, cni 2: the same shape in every version."""
    error = CniError(Code.TRY_LATER, "not yet", details="the agent is starting")
    assert json.loads(error.encode(version=version)) == {
        "cniVersion": version,
        "code": 11,
        "msg": "not yet",
        "details": "the agent is starting",
    }


def test_empty_details_are_left_out() -> None:
    assert "details" not in json.loads(CniError(Code.BAD_CONFIG, "no name").encode(version="1.0.0"))


def test_any_text_becomes_valid_json() -> None:
    """C-003: a path or a name from outside may hold anything, even half a character."""
    error = CniError(Code.FAILED, 'quote " newline \n surrogate \udcff', details="\x00")
    assert json.loads(error.encode(version="1.0.0").decode("ascii"))["msg"] == error.message


def test_codes_are_those_of_the_specification() -> None:
    """cni 2."""
    assert [int(code) for code in Code if code < 100] == [1, 2, 3, 4, 5, 6, 7, 8, 11, 50, 51]


def test_what_a_plugin_printed_comes_back() -> None:
    error = CniError.decode(CniError(102, "no link", details="eth0").encode(version="0.4.0"))
    assert error is not None
    assert (error.code, error.message, error.details) == (102, "no link", "eth0")


@pytest.mark.parametrize("stdout", [b"", b"oops", b"null", b"[]", b'{"msg":"x"}', b'{"code":"7"}', b"\xff"])
def test_what_is_no_error_object_is_none(stdout: bytes) -> None:
    assert CniError.decode(stdout) is None
