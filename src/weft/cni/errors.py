"""CNI errors: their codes and their JSON (C-002, cni 2)."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Self


class Code(IntEnum):
    """The error codes: the specification defines those below 100, ours begin at 100."""

    INCOMPATIBLE_VERSION = 1
    # The message names the member and its value.
    UNSUPPORTED_FIELD = 2
    # The runtime need not clean up.
    UNKNOWN_CONTAINER = 3
    # The message names the variables.
    BAD_ENVIRONMENT = 4
    IO_FAILURE = 5
    NOT_DECODED = 6
    BAD_CONFIG = 7
    BAD_NETNS = 8
    TRY_LATER = 11
    # STATUS only: ADD cannot be served.
    UNAVAILABLE = 50
    # STATUS only: and the connectivity of attached containers may be limited.
    UNAVAILABLE_AND_LIMITED = 51
    FAILED = 100
    # No address is left.
    EXHAUSTED = 101
    DATAPATH_FAULT = 102


class CniError(Exception):
    """An error in the form of the CNI specification, for the runtime."""

    def __init__(self, code: int, message: str, *, details: str = "") -> None:
        super().__init__(f"{message}; {details}" if details else message)
        self.code = code
        self.message = message
        self.details = details

    def encode(self, *, version: str) -> bytes:
        """The error object for stdout. Its shape is the same in every version of the specification."""
        members = {"cniVersion": version, "code": int(self.code), "msg": self.message}
        if self.details:
            members["details"] = self.details
        return json.dumps(members, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def decode(cls, stdout: bytes) -> Self | None:
        """The error that a plugin printed, or None when what it printed is not an error object."""
        try:
            members = json.loads(stdout)
        except (ValueError, RecursionError):
            return None
        if not isinstance(members, dict) or not isinstance(code := members.get("code"), int):
            return None
        return cls(code, str(members.get("msg", "")), details=str(members.get("details", "")))
