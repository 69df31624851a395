"""Writes the reference page of netctl from the command table: `python -m weft.ctl.netctl.reference`."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ctl.files import CONFIG_FILE
from weft.ctl.netctl.cli_spec import Command, Flag
from weft.ctl.netctl.commands import COMMANDS, GLOBAL_FLAGS, NOUNS

_START = f"""\
# netctl

The command line of netmaster. `make docs` generates this page from the command table, and a test checks that it is up
to date.

`netctl [flags] NOUN VERB [flags] [arguments]`: every command has `--help`. Lists are tables, on a terminal and in a
pipe; `--json` prints a JSON array with one object per line, `--quiet` prints names only. `inspect` prints indented
JSON: `Config` is the configuration, `Oper` the operational state.

Commands that create, change or delete print the key of the object and what has happened: `blue:web created`, `blue:web
changed: policies -old +new`, `blue:web unchanged`, `blue:web deleted`. As in Contiv, `create` also changes an existing
object, if its kind is mutable: only what the flags say. What is not given keeps its value; flags such as `--no-policy`
remove a value. If the change would newly allow traffic, `create` refuses (exit code 6) and says what it would open;
`--force` does it. Other commands that newly allow traffic say so in lines `opens: …`. Endpoints to come count: a group
without endpoints opens too. `--dry-run` is `--preview`: nothing is written.

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | the command line is invalid; nothing was sent |
| 2 | no reply from netmaster in time |
| 3 | netmaster rejected the request; the message says why |
| 4 | a file or the output cannot be read or written |
| 5 | the change was committed, but `--wait` timed out before every node applied it; the message names the nodes |
| 6 | the change of an existing object would newly allow traffic; nothing was changed; `--force` does it |

## Authentication

The token is taken from `NETCTL_TOKEN`, else from `{CONFIG_FILE}` (`{{"token": "…"}}`, mode 0600), and is sent only
over https or to a loopback address.

## Shell completion

| shell | setup |
|---|---|
| bash | `source <(netctl completion bash)` in `~/.bashrc` |
| zsh | `netctl completion zsh > _netctl` in a directory of `$fpath` |
| fish | `netctl completion fish > ~/.config/fish/completions/netctl.fish` |

## Flags of every command
"""


def reference() -> str:
    """The text of the page."""
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
    yield "| flag | meaning | default |"
    yield "|---|---|---|"
    for flag in flags:
        value = f" {flag.shown}" if flag.takes_value else f"[={flag.shown}]" if flag.form == "wait" else ""
        # A bar would end the cell of the Markdown table.
        names = ", ".join(f"`{name}{value}`".replace("|", "\\|") for name in flag.names)
        default = "required" if flag.required else f"`{flag.default}`" if flag.default is not None else ""
        yield f"| {names} | {flag.text} | {default} |"
    yield ""


if __name__ == "__main__":
    print(reference(), end="")
