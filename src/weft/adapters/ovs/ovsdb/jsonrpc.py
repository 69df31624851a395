"""The messages of OVSDB (RFC 7047, JSON-RPC 1.0) out of a stream of bytes, in which nothing stands between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.domain.errors import DatapathFault

# Bytes. More than a switch of 100,000 ports has to say.
LARGEST_MESSAGE = 256 << 20


class Message(msgspec.Struct, frozen=True):
    """A request (with a method), a notification (whose id is null) or an answer. Members we do not know are ignored."""

    method: str | None = None
    params: list[Any] | None = None
    id: Any = None
    result: Any = None
    error: Any = None


def encode(message: dict[str, object]) -> bytes:
    return msgspec.json.encode(message)


class Incoming:
    """Puts messages together again.

    A message ends in a brace, but only a parser can tell which. So nothing is tried before the last byte is one, and
    then the whole is taken for one message first: that is what it nearly always is.
    """

    def __init__(self) -> None:
        self._waiting = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete; `DatapathFault` when they can never become one."""
        self._waiting += data
        if len(self._waiting) > LARGEST_MESSAGE:
            raise DatapathFault(f"ovsdb: a message of more than {LARGEST_MESSAGE} bytes")
        if not data.rstrip().endswith(b"}"):
            return []
        try:
            whole = [msgspec.json.decode(self._waiting, type=Message)]
        except msgspec.DecodeError:
            return [*self._feed_several()]
        self._waiting.clear()
        return whole

    def _feed_several(self) -> Iterator[Message]:
        """The messages of what is more, or less, than one."""
        try:
            text = self._waiting.decode().lstrip()
        except UnicodeDecodeError as error:
            raise DatapathFault("ovsdb: what it said is not UTF-8") from error
        decoder, at = json.JSONDecoder(), 0
        while at < len(text):
            try:
                found, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                break
            except RecursionError as error:
                raise DatapathFault("ovsdb: what it said is nested too deeply") from error
            yield _message(found)
            at = len(text) - len(text[end:].lstrip())
        rest = text[at:]
        if rest and not rest.startswith("{"):
            raise DatapathFault(f"ovsdb: {rest[:40]!r} does not begin a message")
        self._waiting[:] = rest.encode()


def _message(found: object) -> Message:
    try:
        return msgspec.convert(found, Message)
    except msgspec.ValidationError as error:
        raise DatapathFault(f"ovsdb: not a message: {error}") from error
