"""The versions of the CNI specification, and the answer to VERSION."""

from __future__ import annotations

import json
import re
from enum import StrEnum

from weft.cni.errors import CniError, Code


class SpecVersion(StrEnum):
    """A supported version. They compare in order as strings, because each of their numbers has one digit."""

    V0_1_0 = "0.1.0"
    V0_2_0 = "0.2.0"
    V0_3_0 = "0.3.0"
    V0_3_1 = "0.3.1"
    V0_4_0 = "0.4.0"
    V1_0_0 = "1.0.0"
    V1_1_0 = "1.1.0"


SUPPORTED = tuple(SpecVersion)
NEWEST = SUPPORTED[-1]
# The version of a configuration without `cniVersion` (C-024).
DEFAULT = SpecVersion.V0_1_0

_NUMBERS = re.compile(r"\d{1,9}\.\d{1,9}(?:\.\d{1,9})?")
_PRINTABLE = re.compile(r"[0-9A-Za-z.+-]{1,32}")


def parse_version(value: object) -> SpecVersion:
    """The requested version. Unreadable is code 6; unsupported is code 1, with the supported ones (C-024, C-025)."""
    if value is None or value == "":
        return DEFAULT
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
    """The version of an error about a request, whatever else is wrong with the request."""
    return _requested_version(stdin) or DEFAULT


def encode_versions(stdin: bytes) -> bytes:
    """The answer to VERSION: the requested version, or our newest, and all supported ones (C-093, C-094)."""
    members = {"cniVersion": _requested_version(stdin) or NEWEST, "supportedVersions": SUPPORTED}
    return json.dumps(members, separators=(",", ":")).encode() + b"\n"


def _requested_version(stdin: bytes) -> str:
    try:
        requested = json.loads(stdin)["cniVersion"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    # It is printed in the answer, so it must not be able to carry anything else.
    return requested if isinstance(requested, str) and _PRINTABLE.fullmatch(requested) else ""
