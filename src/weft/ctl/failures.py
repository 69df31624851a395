"""How a command can fail, and the exit code that says so (contiv 3)."""

from __future__ import annotations

from weft.domain.errors import WeftError


class Failure(WeftError):
    """A command ended without doing what was asked; the message tells the person at the terminal what to do."""

    exit_code = 3


class Usage(Failure):
    """The command line itself is wrong; nothing was sent."""

    code = "usage"
    exit_code = 1


class Unreachable(Failure):
    """No netmaster answered. A request that changes something may have been carried out all the same."""

    code = "unreachable"
    exit_code = 2


class CommandError(Failure):
    """The netmaster answered, and its answer is no."""

    code = "refused"
    exit_code = 3


class Behind(Failure):
    """It was written, and stands, but was not in force on every node in time."""

    code = "behind"
    exit_code = 5


class FileFault(Failure):
    """A file, or the output itself, could not be read or written."""

    code = "file"
    exit_code = 4
