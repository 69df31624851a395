"""The hand-over from agent to netdns: messages on a unix socket, each answered when it is in force.

    frame = length of the body (4 bytes, big-endian)  body (MessagePack)

`FullSync` and `Tenant` name an end state and may be said at any time. `Entries` builds on what the same connection
has said before, so an agent that lost its connection starts anew, and whatever happened meanwhile is put right. netdns
keeps what it was told in a file of the same frames, and goes on from there while no agent is present.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

from weft.domain.dns.names import Entry, Zone
from weft.domain.errors import Malformed
from weft.domain.ids import TenantName

# Of the socket, in the directory that agent and netdns share.
SOCKET_NAME = "dns.sock"
LARGEST_BODY = 256 << 20
LENGTH = struct.Struct("!I")


class FullSync(msgspec.Struct, frozen=True, tag="everything"):
    """All tenants that have a space on this node; others are forgotten, and their sockets closed."""

    zones: dict[TenantName, Zone]


class Tenant(msgspec.Struct, frozen=True, tag="tenant"):
    """One tenant, whose space is there now; or, without a zone, one whose space is about to go."""

    tenant: TenantName
    zone: Zone | None = None


class Entries(msgspec.Struct, frozen=True, tag="entries"):
    """What changed among the names of one tenant."""

    tenant: TenantName
    put: dict[str, Entry] = {}
    drop: tuple[str, ...] = ()


class StatusQuery(msgspec.Struct, frozen=True, tag="look"):
    """Changes nothing; the answer tells how netdns is."""


Message = FullSync | Tenant | Entries | StatusQuery


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to every message: what was refused, in words, and how netdns is."""

    refused: str = ""
    # Tenants with sockets in their space.
    serving: tuple[TenantName, ...] = ()
    # Whom it asks about the outside, by address.
    resolvers: tuple[str, ...] = ()
    statistics: dict[str, int] = {}


_ENCODER = msgspec.msgpack.Encoder()
_MESSAGES: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_REPORTS = msgspec.msgpack.Decoder(Report)


def encode(message: Message | Report) -> bytes:
    """A whole frame."""
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_message(body: bytes) -> Message:
    """A message, or `Malformed`."""
    try:
        return _MESSAGES.decode(body)
    except msgspec.MsgspecError as error:
        raise Malformed(f"not a message: {error}") from error


def decode_report(body: bytes) -> Report:
    """A report, or `Malformed`."""
    try:
        return _REPORTS.decode(body)
    except msgspec.MsgspecError as error:
        raise Malformed(f"not a report: {error}") from error


async def read_body(reader: asyncio.StreamReader) -> bytes:
    """The body of the next frame; `IncompleteReadError` when there is none, `Malformed` when it is too large."""
    [length] = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > LARGEST_BODY:
        raise Malformed(f"a frame of {length} bytes")
    return await reader.readexactly(length)
