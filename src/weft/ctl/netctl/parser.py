"""From words to a call: argparse, built only for the one command that the line names."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, NoReturn

from weft import __version__
from weft.ctl.client import DEFAULT_WAIT, Connection
from weft.ctl.failures import Usage
from weft.ctl.netctl.cli_spec import Command, Flag, Noun
from weft.ctl.netctl.commands import COMMANDS, GLOBAL_FLAGS, NOUNS

_ENVIRONMENT = {"netmaster": "NETMASTER", "insecure": "INSECURE", "cacert": "NETCTL_CACERT"}
_TRUE = frozenset({"1", "t", "true", "y", "yes"})
_LONGEST_TIMEOUT = 86400
_LONGEST_WAIT = 60


class Parsed(NamedTuple):
    """A command with what was given to it, and how to reach the netmaster."""

    command: Command
    given: Mapping[str, object]
    switches: frozenset[str]
    connection: Connection
    # For how long to wait until it is in force; 0 for not at all.
    seconds: float


class _Parser(argparse.ArgumentParser):
    """An argparse parser whose complaints are `Usage` and whose flags are never abbreviated."""

    def __init__(self, prog: str, *, description: str = "", add_help: bool = True) -> None:
        # The width is fixed because asking for the terminal's costs the import of shutil on every start.
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
    """Understand a command line, or raise `Usage`. Help and `--version` print and leave with `SystemExit(0)`."""
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
    parser.parse_args(list(_spelled_out(rest, command.flags)), options)
    values = vars(options)
    members = {argument.member: argument.shown for argument in command.arguments}
    members |= {flag.member: flag.names[0] for flag in command.flags if flag.member}
    for member, shown in members.items():
        # An empty tenant would mean all of them, and an empty name the whole list.
        if values[member] == "":
            parser.error(f"{shown} must not be empty")
    return Parsed(
        command=command,
        given={member: values[member] for member in members if values.get(member) is not None},
        switches=frozenset(flag.word for flag in command.flags if flag.form == "switch" and values[flag.word]),
        connection=_connection(options, environment),
        seconds=_seconds(values["wait"], flag="--wait", longest=_LONGEST_WAIT)
        if values.get("wait") is not None
        else 0.0,
    )


def _split_global_flags(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags before the first word, and all that follows."""
    parser = _Parser("netctl", add_help=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--version", "-v", action="version", version=f"netctl version {__version__}")
    _add_global_flags(parser)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(words)
    if options.help:
        _leave_with_menu("netctl COMMAND", (*NOUNS, *COMMANDS))
    rest: list[str] = options.rest
    return options, rest


def _find_command(words: Sequence[str]) -> tuple[str, Command, Sequence[str]]:
    """The command a line begins with, how it is called in full, and the words after it."""
    if not words:
        raise Usage("a command is missing; see netctl --help")
    for command in COMMANDS:
        if words[0] in command.names:
            return f"netctl {command.names[0]}", command, words[1:]
    for noun in NOUNS:
        if words[0] in noun.names:
            break
    else:
        raise _unknown("netctl", words[0], [name for entry in (*NOUNS, *COMMANDS) for name in entry.names])
    prog = f"netctl {noun.names[0]}"
    if words[1:2] in (["-h"], ["--help"]):
        _leave_with_menu(f"{prog} VERB", noun.commands)
    if len(words) == 1:
        raise Usage(f"a verb is missing; see {prog} --help")
    for command in noun.commands:
        if words[1] in command.names:
            return f"{prog} {command.names[0]}", command, words[2:]
    raise _unknown(prog, words[1], [name for command in noun.commands for name in command.names])


def _unknown(prog: str, word: str, known: Sequence[str]) -> Usage:
    import difflib  # noqa: PLC0415 - only a mistake needs it

    near = difflib.get_close_matches(word, known, n=1)
    return Usage(f"{word!r} is not a command" + (f", {near[0]!r} is" if near else "") + f"; see {prog} --help")


def _add_flag(parser: argparse.ArgumentParser, flag: Flag, *, default: object) -> None:
    text = flag.text if flag.default is None else f"{flag.text}; {flag.default} unless given"
    dest = flag.member or flag.word
    if flag.form == "switch":
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
        help=text.replace("%", "%%"),
    )


def _add_global_flags(parser: argparse.ArgumentParser) -> None:
    # Both parsers know them, and neither writes a default over what the other has read.
    for flag in GLOBAL_FLAGS:
        _add_flag(parser, flag, default=argparse.SUPPRESS)


def _connection(options: argparse.Namespace, environment: Mapping[str, str]) -> Connection:
    given = {word: environment[variable] for word, variable in _ENVIRONMENT.items() if environment.get(variable)}
    given |= {flag.word: vars(options)[flag.word] for flag in GLOBAL_FLAGS if flag.word in options}
    defaults = {flag.word: flag.default for flag in GLOBAL_FLAGS}
    return Connection(
        url=str(given.get("netmaster", defaults["netmaster"])),
        insecure=str(given.get("insecure", "")).lower() in _TRUE,
        cacert=str(given.get("cacert", "")),
        timeout=_seconds(str(given.get("timeout", defaults["timeout"])), flag="--timeout", longest=_LONGEST_TIMEOUT),
    )


def _spelled_out(words: Sequence[str], flags: Sequence[Flag]) -> Iterator[str]:
    """The words, where flags that may stand without their value have it: argparse would take the next word for it."""
    bare = {name: f"{name}={DEFAULT_WAIT:g}" for flag in flags if flag.form == "wait" for name in flag.names}
    literal = False
    for word in words:
        literal = literal or word == "--"
        yield word if literal else bare.get(word, word)


def _seconds(text: str, *, flag: str, longest: int) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise Usage(f"{flag} {text!r} is not a number of seconds") from error
    if not 0 < seconds <= longest:
        raise Usage(f"{flag} {text} is out of range: give more than 0 and at most {longest} seconds")
    return seconds


def _leave_with_menu(line: str, entries: Sequence[Noun | Command]) -> NoReturn:
    """Print the words that may come next, as `--help` does, and leave."""
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
