"""Versions of the CNI specification, as asked for and as answered."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from weft.cni.errors import CniError, Code
from weft.cni.versions import NEWEST, SUPPORTED, SpecVersion, answer_version, encode_versions, parse_version


def test_all_versions_are_supported_and_compare_in_order() -> None:
    """C-093: the seven versions of the specification."""
    assert SUPPORTED == ("0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
    assert all(older < newer for older, newer in pairwise(SUPPORTED))


@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_version_is_the_first(value: object) -> None:
    """C-024."""
    assert parse_version(value) is SpecVersion.V0_1_0


@pytest.mark.parametrize("version", ["0.5.0", "1.2.0", "2.0.0", "10.0.0", "1.0"])
def test_an_unsupported_version_is_code_1_and_names_both_sides(version: str) -> None:
    """C-025."""
    with pytest.raises(CniError) as refused:
        parse_version(version)
    assert refused.value.code == Code.INCOMPATIBLE_VERSION
    assert version in refused.value.details
    assert all(supported in refused.value.details for supported in SUPPORTED)


@pytest.mark.parametrize("value", [1, 1.0, [], {}, True, "one", "1.0.0-rc1", "1.0.0\n", "1." * 20])
def test_what_is_no_version_is_code_6(value: object) -> None:
    with pytest.raises(CniError) as refused:
        parse_version(value)
    assert refused.value.code == Code.NOT_DECODED


@pytest.mark.parametrize(
    ("stdin", "answered"),
    [
        (b'{"cniVersion":"0.4.0"}', "0.4.0"),
        (b'{"cniVersion":"9.9.9"}', "9.9.9"),
        (b'{"cniVersion":""}', None),
        (b'{"cniVersion":7}', None),
        (b'{"cniVersion":"1.0.0\\n"}', None),
        (b"{}", None),
        (b"[]", None),
        (b"", None),
        (b"\xff", None),
        (b"[" * 100_000, None),
    ],
)
def test_answers_carry_the_version_of_the_request(stdin: bytes, answered: str | None) -> None:
    """C-043 for errors, which fall back to what a silent configuration means; C-094 for VERSION, to our newest."""
    assert answer_version(stdin) == (answered or "0.1.0")
    versions = json.loads(encode_versions(stdin))
    assert versions == {"cniVersion": answered or NEWEST, "supportedVersions": list(SUPPORTED)}
