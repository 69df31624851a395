"""Settings of a program from flags and environment variables, as one frozen value. All faults are reported at once.

A flag overrides its variable, a variable overrides the default. A bad setting ends the program with code 22
(contiv 1.2).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

# EINVAL, as in Contiv.
EXIT_BAD_SETTING = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One setting: its flags, its variable without the program's prefix, and the parser of its text.

    `read` raises ValueError with a sentence that says what is valid. Without `read` it is a switch.
    """

    name: str
    flags: tuple[str, ...]
    env: str = ""
    default: Any = ""
    read: Callable[[str], Any] | None = str
    help: str = ""
    hidden: bool = False


class BadSettings(Exception):
    """All faults found in one set of flags and variables."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = tuple(faults)


def read_settings(
    program: str, options: Sequence[Option], *, argv: Sequence[str], environ: Mapping[str, str], version: str
) -> dict[str, Any]:
    """The settings by name. Variables are `CONTIV_<PROGRAM>_<env>`; `--help` and `--version` end the program."""
    # allow_abbrev: an abbreviated flag would change its meaning when a new flag is added.
    parser = _Parser(prog=program, allow_abbrev=False)
    parser.add_argument("--version", "-v", action="version", version=version)
    for option in options:
        # Hidden: accepted for Contiv's sake, or for tests.
        text = argparse.SUPPRESS if option.hidden else option.help
        if option.read is None:
            parser.add_argument(*option.flags, dest=option.name, action="store_const", const="true", help=text)
        else:
            parser.add_argument(*option.flags, dest=option.name, metavar="VALUE", help=text)
    flags = parser.parse_args(list(argv))
    faults: list[str] = []
    settings: dict[str, Any] = {}
    for option in options:
        variable = f"CONTIV_{program.upper()}_{option.env}" if option.env else ""
        text = getattr(flags, option.name)
        source = option.flags[0]
        # Environment variables of containers are often set and empty: that is a value too.
        if text is None and variable in environ:
            text, source = environ[variable], variable
        try:
            settings[option.name] = option.default if text is None else (option.read or _read_switch)(text)
        except ValueError as error:
            faults.append(f"{source}: {error}")
    if faults:
        raise BadSettings(faults)
    return settings


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadSettings([message])


def refuse(program: str, error: BadSettings) -> NoReturn:
    """Print the faults and exit with the code for a bad setting."""
    for fault in error.faults:
        sys.stderr.write(f"{program}: {fault}\n")
    sys.stderr.write(f"{program}: see {program} --help\n")
    # A code of its own, so that systemd units can stop restarting.
    raise SystemExit(EXIT_BAD_SETTING)


def _read_switch(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "yes", "on"}:
        return True
    if lowered in {"", "0", "false", "no", "off"}:
        return False
    raise ValueError(f"{text!r} is not true or false")


def one_of(*words: str) -> Callable[[str], str]:
    """A parser that accepts one of the words."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is not one of {', '.join(words)}")
        return text

    return read


def comma_list(text: str) -> tuple[str, ...]:
    """Parse `a,b,c`; empty items are rejected."""
    items = tuple(item.strip() for item in text.split(",")) if text else ()
    if not all(items):
        raise ValueError(f"{text!r} has an empty item")
    return items


def url_list(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of http or https URLs."""
    items = comma_list(text)
    for item in items:
        scheme, separator, rest = item.partition("://")
        if scheme not in {"http", "https"} or not separator or not rest:
            raise ValueError(f"{item!r} is not a URL such as http://127.0.0.1:2379")
    return items


def host_port(text: str) -> tuple[str, int]:
    """Parse `host:port` or `[v6]:port`, port 1 to 65535."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not host:port with a port of 1 to 65535")
    return host, int(port)


def count(text: str) -> int:
    """Parse a positive number of things."""
    if not text.isascii() or not text.isdigit() or not 0 < int(text[:12]) < 10**9:
        raise ValueError(f"{text!r} is not a number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """Parse a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise ValueError(f"{text!r} is not a positive number of seconds")
    return value
