"""Generates shell completion scripts from the command table: `python -m weft.ctl.netctl.completion DIRECTORY`.

`make docs` writes them to `weft/ctl/completions`, and `netctl completion SHELL` prints them from there. They are
static: completion starts no Python and sends no request. Only this generator needs shtab.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import shtab

from weft.ctl.netctl.cli_spec import Argument, Command, Flag
from weft.ctl.netctl.commands import COMMANDS, GLOBAL_FLAGS, NOUNS

SHELLS = ("bash", "fish", "zsh")


def build_parser() -> ArgumentParser:
    """An argparse parser of all commands. netctl itself builds the parser of one command only, which is faster."""
    parser = ArgumentParser(prog="netctl", description="command line of netmaster")
    parser.add_argument("--version", "-v", action="store_true", help="show the version of netctl")
    _add_flags(parser, GLOBAL_FLAGS)
    # Hidden aliases are left out on purpose.
    top = parser.add_subparsers()
    for noun in NOUNS:
        verbs = top.add_parser(noun.names[0], aliases=noun.names[1:], help=noun.text).add_subparsers()
        for command in noun.commands:
            _add_command(verbs.add_parser(command.names[0], aliases=command.names[1:], help=command.text), command)
    for command in COMMANDS:
        _add_command(top.add_parser(command.names[0], aliases=command.names[1:], help=command.text), command)
    return parser


def _add_command(parser: ArgumentParser, command: Command) -> None:
    for argument in command.arguments:
        _add_argument(parser, argument)
    # netctl accepts global flags before and after the command.
    _add_flags(parser, (*command.flags, *GLOBAL_FLAGS))


def _add_argument(parser: ArgumentParser, argument: Argument) -> None:
    added: Any = parser.add_argument(
        argument.member,
        metavar=argument.shown,
        help=argument.text,
        nargs="?" if argument.optional else None,
        choices=argument.values or None,
    )
    if argument.shown == "FILE":
        added.complete = shtab.FILE


def _add_flags(parser: ArgumentParser, flags: Iterable[Flag]) -> None:
    for flag in flags:
        if flag.takes_value:
            added: Any = parser.add_argument(
                *flag.names, metavar=flag.shown, help=flag.text, choices=flag.values or None
            )
            if flag.shown == "FILE":
                added.complete = shtab.FILE
        else:
            # `--wait` has an optional value after `=`; the next word is never its value.
            parser.add_argument(*flag.names, action="store_true", help=flag.text)


def completion_script(shell: str) -> str:
    """The completion script of a shell."""
    return str(shtab.complete(build_parser(), shell=shell))


def main() -> None:
    """Write the script of every shell to the directory."""
    for shell in SHELLS:
        (Path(sys.argv[1]) / f"netctl.{shell}").write_text(completion_script(shell), encoding="utf-8")


if __name__ == "__main__":
    main()
