"""Parses command lines with argparse. A parser is built only for the command that is called, which is faster."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from weft import __version__
from weft.ctl.client import DEFAULT_WAIT, Connection, is_true
from weft.ctl.failures import Usage
from weft.ctl.netctl.cli_spec import Command, Flag, Noun
from weft.ctl.netctl.commands import COMMANDS, GLOBAL_FLAGS, NOUNS

# Contiv's variables, and NETCTL_CACERT.
_ENVIRONMENT = {"netmaster": "NETMASTER", "insecure": "INSECURE", "cacert": "NETCTL_CACERT"}
_MAX_TIMEOUT = 86400
# The limit of netmaster, which holds a connection open meanwhile.
_MAX_WAIT = 60


class Parsed(NamedTuple):
    """A command with its JSON members and switches, and how to reach netmaster."""

    command: Command
    members: Mapping[str, object]
    switches: frozenset[str]
    connection: Connection
    # Seconds of --wait; 0 without it.
    seconds: float


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises `Usage` and does not accept abbreviated flags."""

    def __init__(self, prog: str, *, description: str = "", add_help: bool = True) -> None:
        # A fixed width: argparse would import shutil to read the terminal's, at every start.
        super().__init__(
            prog=prog,
            description=description,
            add_help=add_help,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
        )

    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message}; see {self.prog} --help")


def parse(words: Sequence[str], *, environment: Mapping[str, str]) -> Parsed:
    """Parse a command line; `Usage` if it is invalid. Help and `--version` print and raise `SystemExit(0)`."""
    options, line = _split_global_flags(words)
    prog, command, rest = _find_command(line)
    parser = _Parser(prog, description=f"{command.text}.")
    for argument in command.arguments:
        parser.add_argument(
            argument.member,
            metavar=argument.shown,
            help=argument.text,
            nargs="?" if argument.optional else None,
            choices=argument.values or None,
        )
    for flag in command.flags:
        _add_flag(parser, flag, default=flag.default)
    _add_global_flags(parser)
    # Into the same namespace, so that flags before the command count too.
    parser.parse_args(list(_with_default_waits(rest, command.flags)), options)
    values = vars(options)
    members = {argument.member: argument.shown for argument in command.arguments}
    members |= {flag.member: flag.names[0] for flag in command.flags if flag.member and flag.form != "clear"}
    cleared = {flag.member: flag.names[0] for flag in command.flags if flag.form == "clear" and values[flag.word]}
    for member, shown in members.items():
        # An empty tenant would mean all tenants, and an empty name the path of the list.
        if values[member] == "":
            parser.error(f"{shown} must not be empty")
        if member in cleared and values[member] is not None:
            parser.error(f"{cleared[member]} contradicts {shown}")
    return Parsed(
        command=command,
        members={member: values[member] for member in members if values.get(member) is not None}
        | dict.fromkeys(cleared),
        switches=frozenset(flag.word for flag in command.flags if flag.form == "switch" and values[flag.word]),
        connection=_connection(options, environment),
        seconds=_seconds(values["wait"], flag="--wait", maximum=_MAX_WAIT) if values.get("wait") is not None else 0.0,
    )


def _split_global_flags(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The global flags before the command, and the rest of the line."""
    parser = _Parser("netctl", add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", "-v", action="version", version=f"netctl version {__version__}")
    _add_global_flags(parser)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.help:
        _print_menu("netctl COMMAND", (*NOUNS, *COMMANDS))
    rest: list[str] = options.rest
    return options, rest


def _find_command(words: Sequence[str]) -> tuple[str, Command, Sequence[str]]:
    """The full name of the command that the line begins with, the command, and the words after it."""
    if not words:
        raise Usage("a command is missing; see netctl --help")
    for command in COMMANDS:
        if command.is_called(words[0]):
            return f"netctl {command.names[0]}", command, words[1:]
    for noun in NOUNS:
        if words[0] in noun.names:
            break
    else:
        raise _unknown("netctl", words[0], [name for entry in (*NOUNS, *COMMANDS) for name in entry.names])
    prog = f"netctl {noun.names[0]}"
    if words[1:2] in (["-h"], ["--help"]):
        _print_menu(f"{prog} VERB", noun.commands)
    if len(words) == 1:
        raise Usage(f"a verb is missing; see {prog} --help")
    for command in noun.commands:
        if command.is_called(words[1]):
            return f"{prog} {command.names[0]}", command, words[2:]
    raise _unknown(prog, words[1], [name for command in noun.commands for name in command.names])


def _unknown(prog: str, word: str, known: Sequence[str]) -> Usage:
    # A typo is more likely than an unknown command.
    import difflib  # noqa: PLC0415 - slow to import, and only an error needs it

    near = difflib.get_close_matches(word, known, n=1)
    suggestion = f", did you mean {near[0]!r}?" if near else ""
    return Usage(f"{word!r} is not a command{suggestion}; see {prog} --help")


def _add_flag(parser: argparse.ArgumentParser, flag: Flag, *, default: object) -> None:
    text = flag.text if flag.default is None else f"{flag.text} (default {flag.default})"
    # A flag that clears a member has a value of its own beside the one of the flag that sets the member.
    dest = flag.word if flag.form == "clear" else flag.member or flag.word
    if flag.form in {"switch", "clear"}:
        parser.add_argument(*flag.names, dest=dest, action="store_true", default=default or False, help=text)
        return
    parser.add_argument(
        *flag.names,
        dest=dest,
        action="append" if flag.form == "list" else "store",
        type=int if flag.form == "number" else str,
        metavar=flag.shown,
        nargs="?" if flag.form == "wait" else None,
        default=default,
        required=flag.required,
        help=text.replace("%", "%%"),  # argparse formats help texts with %
    )


def _add_global_flags(parser: argparse.ArgumentParser) -> None:
    # Both parsers accept them; SUPPRESS keeps one from overwriting with its default what the other has parsed.
    for flag in GLOBAL_FLAGS:
        _add_flag(parser, flag, default=argparse.SUPPRESS)


def _connection(options: argparse.Namespace, environment: Mapping[str, str]) -> Connection:
    values = {word: environment[variable] for word, variable in _ENVIRONMENT.items() if environment.get(variable)}
    values |= {flag.word: vars(options)[flag.word] for flag in GLOBAL_FLAGS if flag.word in options}
    defaults = {flag.word: flag.default for flag in GLOBAL_FLAGS}
    return Connection(
        url=str(values.get("netmaster", defaults["netmaster"])),
        insecure=is_true(str(values.get("insecure", ""))),
        cacert=str(values.get("cacert", "")),
        timeout=_seconds(str(values.get("timeout", defaults["timeout"])), flag="--timeout", maximum=_MAX_TIMEOUT),
    )


def _with_default_waits(words: Sequence[str], flags: Sequence[Flag]) -> Iterator[str]:
    """The words with a value for each bare `--wait`: argparse would take the next word for its value."""
    bare = {name: f"{name}={DEFAULT_WAIT:g}" for flag in flags if flag.form == "wait" for name in flag.names}
    only_arguments = False
    for word in words:
        only_arguments = only_arguments or word == "--"
        yield word if only_arguments else bare.get(word, word)


def _seconds(text: str, *, flag: str, maximum: int) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise Usage(f"{flag} {text!r} is not a number of seconds") from error
    # Written so that nan fails too.
    if not 0 < seconds <= maximum:
        raise Usage(f"{flag} {text} is out of range: give more than 0 and at most {maximum} seconds")
    return seconds


def _print_menu(line: str, entries: Sequence[Noun | Command]) -> NoReturn:
    """Print the commands or verbs of a level, as `--help` does, and exit."""
    words = [(", ".join(entry.names), entry.text) for entry in entries]
    flags = [
        (f"{flag.names[0]} {flag.shown}" if flag.takes_value else flag.names[0], flag.text) for flag in GLOBAL_FLAGS
    ]
    width = max(len(name) for name, _ in words + flags)
    print(f"usage: {line} ...\n")
    print(*(f"  {name:{width}}  {text}" for name, text in words), sep="\n")
    print("\nflags of every command:")
    print(*(f"  {name:{width}}  {text}" for name, text in flags), sep="\n")
    print(f"\nmore: {line} --help")
    raise SystemExit(0)
