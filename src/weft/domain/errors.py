"""The error tree, and the meaning of each error for a caller.

- `WeftError`
    - `Invalid`: can never be accepted; correct the input (HTTP 422, CNI 7)
        - `Malformed`: cannot even be parsed (HTTP 400, CNI 6)
    - `NotFound`: the named object does not exist (HTTP 404)
    - `Conflict`: valid, but not in the present state: in use, overlapping, duplicate (HTTP 409)
        - `Stale`: the state has changed; read and decide again (HTTP 409)
        - `Mismatch`: the caller's own precondition does not hold (HTTP 412)
        - `OpensTraffic`: would newly allow traffic, and the caller wants that refused (HTTP 409)
        - `Exhausted`: nothing left to allocate (HTTP 409, CNI 101)
    - `Denied`: the caller lacks permission (HTTP 403; 401 without credentials)
    - `Unavailable`: try again later (HTTP 503, CNI 11)
        - `Compacted`: the requested history was compacted; list again
        - `Limited`: the caller exceeds a limit, nothing was done; slow down (HTTP 429)
    - `Behind`: written, but not realized on all nodes by the deadline (HTTP 504)
    - `DatapathFault`: the kernel or the switch did not apply a change (HTTP 500, CNI 102)
"""

from __future__ import annotations

from collections.abc import Mapping


class WeftError(Exception):
    """The root: a message for people, the field at fault if there is one, and details for programs."""

    # Stable identifiers for programs: REST clients and the remote store dispatch on them.
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
    """The input cannot be parsed."""

    code = "malformed"


class NotFound(WeftError):
    """The named object does not exist."""

    code = "not-found"


class Conflict(WeftError):
    """The present state does not allow it."""

    code = "conflict"


class Stale(Conflict):
    """A compare of a commit failed: the state has changed since it was read."""

    code = "stale"


# Not `Stale`: the caller asked for this precondition, so retrying is not up to us.
class Mismatch(Conflict):
    """The caller's own precondition (If-Match, If-None-Match) does not hold."""

    code = "mismatch"


class OpensTraffic(Conflict):
    """The change would newly allow traffic, and the caller wants that refused."""

    code = "opens-traffic"


class Exhausted(Conflict):
    """A pool has nothing left to allocate."""

    code = "exhausted"


class Denied(WeftError):
    """The caller lacks permission."""

    code = "denied"


class Unavailable(WeftError):
    """A dependency is unreachable; the same call may succeed later."""

    code = "unavailable"


class Compacted(Unavailable):
    """The store has compacted the history that a watch requires: list again."""

    code = "compacted"


class Limited(Unavailable):
    """The caller exceeds a limit. Nothing was done; `details` has `limit` and `retryAfter`, in seconds."""

    code = "too-many-requests"


# Not `Unavailable`: the write stands, and repeating it would be wrong.
class Behind(WeftError):
    """The write succeeded, but some nodes have not applied it by the deadline."""

    code = "behind"


class DatapathFault(WeftError):
    """The kernel or the switch rejected a request, or sent an invalid response."""

    code = "datapath-fault"
