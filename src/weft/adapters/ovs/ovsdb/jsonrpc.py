"""Decode the JSON-RPC 1.0 messages of OVSDB (RFC 7047) from a byte stream without delimiters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.domain.codec import UNDECODABLE
from weft.domain.errors import DatapathFault

# Bytes; the initial dump of a switch with 100,000 ports is smaller.
MAX_MESSAGE = 256 << 20
_WHITESPACE = re.compile(r"\s*")


class Message(msgspec.Struct, frozen=True):
    """A request (with a method), a notification (with a null id) or a reply. Unknown members are ignored."""

    method: str | None = None
    params: list[Any] | None = None
    id: Any = None
    result: Any = None
    error: Any = None


def encode(message: dict[str, object]) -> bytes:
    return msgspec.json.encode(message)


class Incoming:
    """Reassembles messages.

    A message ends in a brace, but only a parser knows in which one. So nothing is parsed before the last byte is a
    brace; then all data is tried as one message first, which it nearly always is.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that these bytes complete; `DatapathFault` if they are not valid JSON-RPC."""
        self._buffer += data
        if len(self._buffer) > MAX_MESSAGE:
            raise DatapathFault(f"ovsdb: message larger than {MAX_MESSAGE} bytes")
        # Without this a large dump would be parsed again for every chunk of it.
        if not data.rstrip().endswith(b"}"):
            return []
        try:
            messages = [msgspec.json.decode(self._buffer, type=Message)]
        except UNDECODABLE:
            return [*self._feed_several()]
        self._buffer.clear()
        return messages

    def _feed_several(self) -> Iterator[Message]:
        """Decode several messages, or the beginning of one."""
        try:
            text = self._buffer.decode().lstrip()
        except UnicodeDecodeError as error:
            raise DatapathFault("ovsdb: invalid UTF-8 in message") from error
        # msgspec does not report where a message ends in a longer buffer; the standard library does.
        decoder, at = json.JSONDecoder(), 0
        while at < len(text):
            try:
                found, end = decoder.raw_decode(text, at)
            except json.JSONDecodeError:
                break
            except (RecursionError, ValueError) as error:  # the latter for integers of thousands of digits
                raise DatapathFault(f"ovsdb: message cannot be decoded: {error}") from error
            yield _message(found)
            space = _WHITESPACE.match(text, end)
            at = space.end() if space else end
        rest = text[at:]
        if rest and not rest.startswith("{"):
            raise DatapathFault(f"ovsdb: {rest[:40]!r} is not the start of a message")
        self._buffer[:] = rest.encode()


def _message(found: object) -> Message:
    try:
        return msgspec.convert(found, Message)
    except (*UNDECODABLE, UnicodeError) as error:  # the latter for escapes of lone surrogates
        raise DatapathFault(f"ovsdb: invalid message: {error}") from error
