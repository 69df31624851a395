"""The versions of the CNI specification, and the answer to VERSION."""

from __future__ import annotations

import json
import re
from enum import StrEnum

from weft.cni.errors import CniError, Code


class SpecVersion(StrEnum):
    """A version we answer in. They compare in order, for each of their numbers has one digit."""

    V0_1_0 = "0.1.0"
    V0_2_0 = "0.2.0"
    V0_3_0 = "0.3.0"
    V0_3_1 = "0.3.1"
    V0_4_0 = "0.4.0"
    V1_0_0 = "1.0.0"
    V1_1_0 = "1.1.0"


SUPPORTED = tuple(SpecVersion)
NEWEST = SUPPORTED[-1]
# What a configuration without `cniVersion` means (C-024).
UNSAID = SpecVersion.V0_1_0

_NUMBERS = re.compile(r"\d{1,9}\.\d{1,9}(?:\.\d{1,9})?")
_PRINTABLE = re.compile(r"[0-9A-Za-z.+-]{1,32}")


def parse_version(value: object) -> SpecVersion:
    """The version asked for. Unreadable is code 6; readable but not ours is code 1 and names ours (C-024, C-025)."""
    if value is None or value == "":
        return UNSAID
    if not isinstance(value, str) or not _NUMBERS.fullmatch(value):
        raise CniError(Code.NOT_DECODED, f"cniVersion {value!r:.80} is not a version")
    try:
        return SpecVersion(value)
    except ValueError as error:
        raise CniError(
            Code.INCOMPATIBLE_VERSION,
            f"CNI version {value} is not supported",
            details=f"requested: {value}; supported: {', '.join(SUPPORTED)}",
        ) from error


def answer_version(stdin: bytes) -> str:
    """The version to write into an error about a request, whatever else is wrong with the request."""
    return _asked_version(stdin) or UNSAID


def encode_versions(stdin: bytes) -> bytes:
    """The answer to VERSION: the version the caller wrote, or our newest, and all that we support (C-093, C-094)."""
    members = {"cniVersion": _asked_version(stdin) or NEWEST, "supportedVersions": SUPPORTED}
    return json.dumps(members, separators=(",", ":")).encode() + b"\n"


def _asked_version(stdin: bytes) -> str:
    try:
        asked = json.loads(stdin)["cniVersion"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return asked if isinstance(asked, str) and _PRINTABLE.fullmatch(asked) else ""
