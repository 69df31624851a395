"""The types of the command table: nouns, commands, arguments and flags."""

from __future__ import annotations

from typing import Literal, NamedTuple

from weft.ctl.netctl.actions import Action

# A `list` flag may be repeated; the JSON member becomes an array.
# A `clear` flag takes no value and sends null, which resets the member.
FlagForm = Literal["text", "number", "list", "switch", "clear", "wait"]


class Flag(NamedTuple):
    """An option. `member` is the JSON member it sets; a switch sets none and is identified by its first name.

    A flag of the form `wait` takes a value only after `=`, as in `--wait=5`, and has a default without it.
    `values` are for help and completion only: netmaster validates them.
    """

    names: tuple[str, ...]
    text: str
    member: str = ""
    form: FlagForm = "text"
    default: str | int | None = None
    required: bool = False
    values: tuple[str, ...] = ()
    placeholder: str = ""

    @property
    def word(self) -> str:
        """The long name without its dashes."""
        return self.names[0].lstrip("-")

    @property
    def takes_value(self) -> bool:
        """Whether it needs a value, as the next word or after `=`."""
        return self.form not in {"switch", "clear", "wait"}

    @property
    def shown(self) -> str:
        """The placeholder of the value in help texts."""
        # `--encap vlan|vxlan` documents the values without a further column.
        return self.placeholder or "|".join(self.values) or self.word.replace("-", "_").upper()


class Argument(NamedTuple):
    """A positional argument; `member` is the JSON member it sets."""

    member: str
    shown: str
    text: str
    optional: bool = False
    values: tuple[str, ...] = ()


class Command(NamedTuple):
    """A verb of a noun, or a command without a noun. `names` are the name and its aliases.

    `hidden` are former names that still work but are not documented.
    """

    names: tuple[str, ...]
    text: str
    run: Action
    arguments: tuple[Argument, ...] = ()
    flags: tuple[Flag, ...] = ()
    hidden: tuple[str, ...] = ()

    def is_called(self, name: str) -> bool:
        """Whether a word of the command line means this command."""
        return name in self.names or name in self.hidden


class Noun(NamedTuple):
    """A kind of object with its verbs; `names` are the word and its aliases."""

    names: tuple[str, ...]
    text: str
    commands: tuple[Command, ...]
