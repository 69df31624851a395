"""The failures of commands and their exit codes (docs/compatibility/contiv.md, section 3)."""

from __future__ import annotations

from weft.domain.errors import WeftError


class Failure(WeftError):
    """A command failed; the message says what to do."""

    # Scripts depend on these codes; docs/reference/netctl.md lists them.
    exit_code = 3


class Usage(Failure):
    """The command line is invalid; nothing was sent."""

    code = "usage"
    exit_code = 1


class Unreachable(Failure):
    """No reply from netmaster or the agent. A write may have been executed nevertheless."""

    code = "unreachable"
    exit_code = 2


class CommandError(Failure):
    """The server rejected the request."""

    code = "refused"
    exit_code = 3


class Behind(Failure):
    """The write was committed, but some nodes did not apply it in time."""

    # The code that netmaster sends with 504, as in weft.domain.errors.
    code = "behind"
    exit_code = 5


class Opens(Failure):
    """The change would newly allow traffic; nothing was changed."""

    # The code that netmaster sends with 409, as in weft.domain.errors.
    code = "opens-traffic"
    exit_code = 6


class FileFault(Failure):
    """A file or the standard output cannot be read or written."""

    code = "file"
    exit_code = 4
