"""Typed access to JSON objects, with errors that name the member's path.

`null` and absent are the same, as in every CNI library. Where absent and empty differ, absent is `None`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NoReturn, Self

from weft.cni.errors import CniError, Code


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# Python's decoder accepts NaN and Infinity, which are not JSON.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def decode_json(text: bytes) -> object:
    """The value in `text`, which must be UTF-8; else code 6."""
    try:
        value: object = _DECODER.decode(text.decode())
    except (ValueError, RecursionError) as error:  # deep nesting exhausts the stack of Python's decoder
        raise CniError(Code.NOT_DECODED, "the network configuration is not JSON", details=str(error)) from error
    return value


class Document:
    """A JSON object. A member of another type than requested is code 7, with the member's path."""

    def __init__(self, members: Mapping[str, object], *, where: str = "") -> None:
        self._members = members
        self._where = where

    @classmethod
    def of(cls, value: object, *, where: str = "") -> Self:
        """The object, or code 7 when the value is something else."""
        if not isinstance(value, dict):
            raise CniError(Code.BAD_CONFIG, f"{where or 'the document'} must be an object")
        return cls(value, where=where)

    def in_any_case(self) -> Document:
        """The same object with lower-case names: Go's decoder matches names in any case, so callers write any."""
        return Document({name.lower(): value for name, value in self._members.items()}, where=self._where)

    def __contains__(self, name: str) -> bool:
        """Whether the member is there and not null."""
        return self._members.get(name) is not None

    def raw(self, name: str) -> object:
        """The decoded member; None when absent."""
        return self._members.get(name)

    def place(self, name: str) -> str:
        """The member's path, for messages."""
        return f"{self._where}.{name}" if self._where else name

    def fault(self, name: str, expected: str) -> CniError:
        """The error to raise about a member."""
        return CniError(Code.BAD_CONFIG, f"{self.place(name)} must be {expected}, not {self.raw(name)!r:.80}")

    def text(self, name: str) -> str:
        """A string; empty when absent."""
        value = self.raw(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.fault(name, "a string")
        return value

    def number(self, name: str) -> int | None:
        """A whole number that is not negative; None when absent."""
        value = self.raw(name)
        if value is None:
            return None
        # `bool` is a subclass of `int` in Python, but `true` is not a number in JSON.
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.fault(name, "a whole number from 0 on")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of strings; empty when absent."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fault(name, "a list of strings")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, str]:
        """An object whose members are all strings; empty when absent."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise self.fault(name, "an object of strings")
        return dict(value)

    def child(self, name: str) -> Document:
        """An object; without members when absent."""
        value = self.raw(name)
        return Document.of({} if value is None else value, where=self.place(name))

    def children(self, name: str) -> tuple[Document, ...]:
        """A list of objects; empty when absent."""
        value = self.raw(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.fault(name, "a list of objects")
        return tuple(Document.of(item, where=f"{self.place(name)}[{index}]") for index, item in enumerate(value))
