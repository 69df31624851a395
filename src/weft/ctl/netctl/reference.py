"""The reference of netctl in Markdown, written from the table of commands: `python -m weft.ctl.netctl.reference`."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ctl.files import CONFIG_FILE
from weft.ctl.netctl.cli_spec import Command, Flag
from weft.ctl.netctl.commands import COMMANDS, GLOBAL_FLAGS, NOUNS

_START = f"""\
# netctl

The command line of the netmaster. This page is made from the program's own table of commands by
`make docs`; a test keeps it up to date.

`netctl [flags] NOUN VERB [flags] [arguments]`: every command has `--help`. Lists are tables, on a terminal and in a
pipe alike; `--json` prints a JSON array with one object per line, `--quiet` names only. `inspect` prints indented JSON:
`Config` is what was asked for, `Oper` what became of it. Commands that create, change or delete print the key of the
object, such as `default:blue`. As in Contiv, `create` also changes an object that exists, where its kind may change.

## Exit codes

| code | meaning |
|---|---|
| 0 | done |
| 1 | the command line is wrong; nothing was sent |
| 2 | no netmaster answered in time |
| 3 | the netmaster refused; the message says why |
| 4 | a file, or the output, could not be read or written |
| 5 | it was written, but is not in force on every node: `--wait` ran out, and the message names the nodes |

## Who you are

A token is taken from `NETCTL_TOKEN`, else from `{CONFIG_FILE}` (`{{"token": "…"}}`, mode 0600), and is sent only
over https or to this machine.

## Completion

| shell | how |
|---|---|
| bash | `source <(netctl completion bash)` in `~/.bashrc` |
| zsh | `netctl completion zsh > _netctl` in a directory of `$fpath` |
| fish | `netctl completion fish > ~/.config/fish/completions/netctl.fish` |

## Flags of every command
"""


def reference() -> str:
    """The whole page."""
    return "\n".join((_START, *_flag_lines(GLOBAL_FLAGS), *_command_sections()))


def _command_sections() -> Iterator[str]:
    for noun in NOUNS:
        aliases = f" (or `{'`, `'.join(noun.names[1:])}`)" if noun.names[1:] else ""
        yield f"## {noun.names[0]}{aliases}: {noun.text}\n"
        for command in noun.commands:
            yield from _command_lines(command, prog=f"netctl {noun.names[0]}")
    yield "## Other commands\n"
    for command in COMMANDS:
        yield from _command_lines(command, prog="netctl")


def _command_lines(command: Command, *, prog: str) -> Iterator[str]:
    words = "".join(f" [{word.shown}]" if word.optional else f" {word.shown}" for word in command.arguments)
    aliases = f" Also `{'`, `'.join(command.names[1:])}`." if command.names[1:] else ""
    yield f"### `{prog} {command.names[0]}{words}`\n"
    yield f"{command.text}.{aliases}\n"
    if command.arguments:
        yield from (f"- `{word.shown}`: {word.text}" for word in command.arguments)
        yield ""
    if command.flags:
        yield from _flag_lines(command.flags)


def _flag_lines(flags: tuple[Flag, ...]) -> Iterator[str]:
    yield "| flag | meaning | unless given |"
    yield "|---|---|---|"
    for flag in flags:
        value = f" {flag.shown}" if flag.takes_value else f"[={flag.shown}]" if flag.form == "wait" else ""
        names = ", ".join(f"`{name}{value}`".replace("|", "\\|") for name in flag.names)
        default = "must be given" if flag.required else f"`{flag.default}`" if flag.default is not None else ""
        yield f"| {names} | {flag.text} | {default} |"
    yield ""


if __name__ == "__main__":
    print(reference(), end="")
