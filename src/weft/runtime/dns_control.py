"""Control protocol between agent and netdns: zone pushes on a unix socket, each answered when it is in force.

    frame = length of the body (4 bytes, big-endian)  body (MessagePack)

`FullSync` and `Tenant` name an end state and may be sent at any time. `Entries` builds on what the same connection has
sent before. So an agent that lost its connection starts again with a full sync, which corrects whatever happened in
between. netdns keeps the messages in a file of the same frames, and goes on from there while no agent is connected.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from weft.domain.codec import UNDECODABLE
from weft.domain.dns.names import Entry, Zone
from weft.domain.errors import Malformed, Unavailable
from weft.domain.ids import TenantName

# The socket's name in the run directory, which agent and netdns share.
SOCKET_NAME = "dns.sock"
# A bound against a broken peer, far above any real zone.
MAX_BODY = 256 << 20
MAX_REPORT = 4 << 20
LENGTH = struct.Struct("!I")
# How long netdns may take to apply a message.
REPORT_TIMEOUT_S = 5.0


class FullSync(msgspec.Struct, frozen=True, tag="full-sync"):
    """The zones of all tenants with a netns on this node. Other tenants are dropped and their sockets closed."""

    zones: dict[TenantName, Zone]
    # Tenants that keep their zone: a message of its own follows for each, so that a large zone delays no other.
    pending: tuple[TenantName, ...] = ()


class Tenant(msgspec.Struct, frozen=True, tag="tenant"):
    """The zone of one tenant whose netns exists now; without a zone, its netns is about to be removed."""

    tenant: TenantName
    zone: Zone | None = None


class Entries(msgspec.Struct, frozen=True, tag="entries"):
    """Changed entries of one tenant's zone."""

    tenant: TenantName
    put: dict[str, Entry] = {}
    drop: tuple[str, ...] = ()


class StatusQuery(msgspec.Struct, frozen=True, tag="status-query"):
    """Changes no zone; the report shows the state of netdns."""


Message = FullSync | Tenant | Entries | StatusQuery


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to every message: whether it could be applied, and the state of netdns."""

    # Not empty if the message was not applied: only a full sync helps.
    error: str = ""
    # How many records and tenants of what is in force were left out as invalid, and the reason for one of them.
    rejected: int = 0
    fault: str = ""
    # Tenants in whose netns it listens.
    serving: tuple[TenantName, ...] = ()
    # The addresses of its upstream resolvers.
    upstreams: tuple[str, ...] = ()
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
    except UNDECODABLE as error:
        raise Malformed(f"not a control message: {error}") from error


def decode_report(body: bytes) -> Report:
    """A report, or `Malformed`."""
    try:
        return _REPORTS.decode(body)
    except UNDECODABLE as error:
        raise Malformed(f"not a report: {error}") from error


async def read_body(reader: asyncio.StreamReader, *, most: int = MAX_BODY) -> bytes:
    """The body of the next frame; `IncompleteReadError` at the end of the stream, `Malformed` when it is too large."""
    # Checked before the body is read: a wrong length must not allocate gigabytes.
    [length] = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > most:
        raise Malformed(f"a frame of {length} bytes")
    return await reader.readexactly(length)


class ControlConnection:
    """The agent's end of a connection to netdns. One message at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, message: Message) -> Report:
        """The report when the message is applied; `Unavailable` when it is not, for whatever reason."""
        try:
            async with asyncio.timeout(REPORT_TIMEOUT_S):
                self._writer.write(encode(message))
                await self._writer.drain()
                report = decode_report(await read_body(self._reader, most=MAX_REPORT))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, Malformed) as error:
            raise Unavailable(f"netdns has not answered: {error or 'timeout'}") from error
        # Retried with a full sync, so `Unavailable` is right even for a rejected message.
        if report.error:
            raise Unavailable(f"netdns rejected the message: {report.error}")
        return report


@asynccontextmanager
async def connect_netdns(socket: Path) -> AsyncIterator[ControlConnection]:
    """A connection while the block runs; `Unavailable` when netdns does not listen there."""
    try:
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket)
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"netdns cannot be reached at {socket}") from error
    try:
        yield ControlConnection(reader, writer)
    finally:
        writer.close()


async def send_once(socket: Path, message: Message) -> Report:
    """Send one message on a connection of its own; `Unavailable` when netdns cannot be reached."""
    async with connect_netdns(socket) as connection:
        return await connection.send(message)
