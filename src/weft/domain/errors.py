"""The error tree, and what each error means to a caller.

- `WeftError`
    - `Invalid`: never as asked; mend the input (HTTP 422, CNI 7)
        - `Malformed`: not even readable as what it should be (HTTP 400, CNI 6)
    - `NotFound`: the thing named does not exist (HTTP 404)
    - `Conflict`: right in itself, but not in the present state: in use, overlapping, duplicate (HTTP 409)
        - `Stale`: the state moved under the caller; read again and decide again (HTTP 409)
        - `Mismatch`: the caller's own precondition does not hold (HTTP 412)
        - `Exhausted`: nothing left to give out (HTTP 409, CNI 101)
    - `Denied`: the caller may not do this (HTTP 403; 401 where no credentials came)
    - `Unavailable`: try again later (HTTP 503, CNI 11)
        - `Compacted`: the history asked for is gone; list again
    - `Behind`: it was written, but is not in force everywhere by the deadline (HTTP 504)
    - `DatapathFault`: the kernel or the switch did not do what it was told (HTTP 500, CNI 102)
"""

from __future__ import annotations

from collections.abc import Mapping


class WeftError(Exception):
    """The root: a message for a person, the field at fault where there is one, and details for a program."""

    code = "internal"

    def __init__(self, message: str, *, field: str = "", details: Mapping[str, object] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.details: Mapping[str, object] = details or {}


class Invalid(WeftError):
    """The input can never be accepted as it is."""

    code = "invalid"


class Malformed(Invalid):
    """The input could not be read at all."""

    code = "malformed"


class NotFound(WeftError):
    """The thing named does not exist."""

    code = "not-found"


class Conflict(WeftError):
    """The present state does not permit it."""

    code = "conflict"


class Stale(Conflict):
    """A compare did not hold: the state moved since it was read."""

    code = "stale"


class Mismatch(Conflict):
    """The caller's own precondition (If-Match, If-None-Match) does not hold."""

    code = "mismatch"


class Exhausted(Conflict):
    """A pool has nothing left to give out."""

    code = "exhausted"


class Denied(WeftError):
    """The caller may not do this."""

    code = "denied"


class Unavailable(WeftError):
    """Something needed is away for now; the same call may succeed later."""

    code = "unavailable"


class Compacted(Unavailable):
    """The store no longer has the history a watch asked for: list again."""

    code = "compacted"


class Behind(WeftError):
    """It was written, but some nodes have not carried it out by the deadline."""

    code = "behind"


class DatapathFault(WeftError):
    """The kernel or the switch refused what it was told to do, or answered nonsense."""

    code = "datapath-fault"
