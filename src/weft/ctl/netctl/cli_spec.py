"""The parts a command line is made of, as values."""

from __future__ import annotations

from typing import Literal, NamedTuple

from weft.ctl.netctl.actions import Action

ResourceVersion = Literal["text", "number", "list", "switch", "wait"]


class Flag(NamedTuple):
    """An option. `member` is the JSON member it sets; a switch sets none, but is named by its first name. A wait takes
    its seconds only after `=`, as in `--wait=5`, and may stand without them: then `default` counts.

    `values` are offered by help and completion; whether a value is right, the netmaster decides.
    """

    names: tuple[str, ...]
    text: str
    member: str = ""
    form: ResourceVersion = "text"
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
        """Whether the next word is its value, unless that is joined by `=`."""
        return self.form not in {"switch", "wait"}

    @property
    def shown(self) -> str:
        """What stands for the value in help texts."""
        return self.placeholder or "|".join(self.values) or self.word.replace("-", "_").upper()


class Argument(NamedTuple):
    """A word that must stand in the line (unless `optional`); `member` is the JSON member it sets."""

    member: str
    shown: str
    text: str
    optional: bool = False
    values: tuple[str, ...] = ()


class Command(NamedTuple):
    """A leaf: `names` are its verb and aliases."""

    names: tuple[str, ...]
    text: str
    run: Action
    arguments: tuple[Argument, ...] = ()
    flags: tuple[Flag, ...] = ()


class Noun(NamedTuple):
    """A word with verbs below it; `names` are the word and its aliases."""

    names: tuple[str, ...]
    text: str
    commands: tuple[Command, ...]
