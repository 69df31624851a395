"""The entry point of netctl: parses the command line, runs the command, and returns the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from weft.ctl.client import Client
from weft.ctl.failures import Failure, FileFault
from weft.ctl.netctl.actions import Call
from weft.ctl.netctl.parser import parse

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> int:
    """Run netctl with the arguments of this process."""
    return run(sys.argv[1:], environment=os.environ)


def run(words: Sequence[str], *, environment: Mapping[str, str]) -> int:
    """Run one command line. A failure is printed to the standard error in one line."""
    try:
        parsed = parse(words, environment=environment)
        client = Client(parsed.connection, environment=environment)
        # Actions yield text piece by piece, so that `version` prints before its request fails.
        for text in parsed.command.run(Call(parsed.members, parsed.switches, client, parsed.seconds)):
            _print(text)
    except Failure as failure:
        field = f" (field {failure.field})" if failure.field and failure.field not in failure.message else ""
        print(f"netctl: {failure.message}{field}", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _print(text: str) -> None:
    """Write UTF-8 regardless of the locale: most output is JSON or is read by a program."""
    try:
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))
        sys.stdout.flush()
    except OSError as error:
        # At exit the interpreter flushes again and would print a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise FileFault(f"cannot write the output: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
