"""The messages between the remote store and the server of it: msgpack bodies over HTTP.

Each call is a POST to `/store/v1/<call>`. A watch is answered with frames: four bytes of length, big-endian, then a
`Frame`; a length of zero is a sign of life.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from weft.domain import errors
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Compare, LeaseId, Revision, Write

PREFIX = "/store/v1"
NODE_HEADER = "X-Weft-Node"
MEDIA_TYPE = "application/msgpack"
# Seconds after which a watch without news gives a sign of life.
HEARTBEAT = 1.0

_LENGTH = struct.Struct(">I")


class KeyRequest(msgspec.Struct, frozen=True):
    """Read a key, or list a prefix."""

    key: StoreKey


class CommitRequest(msgspec.Struct, frozen=True):
    """Commit."""

    compares: tuple[Compare, ...]
    writes: tuple[Write, ...]


class WatchRequest(msgspec.Struct, frozen=True):
    """Watch a prefix."""

    prefix: StoreKey
    since: Revision


class GrantRequest(msgspec.Struct, frozen=True):
    """A new lease."""

    ttl: float


class LeaseRequest(msgspec.Struct, frozen=True):
    """Keep a lease alive, or revoke it."""

    lease: LeaseId


class Fault(msgspec.Struct, frozen=True):
    """One of our errors."""

    code: str
    message: str
    field: str = ""
    details: dict[str, Any] = {}


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of a watch, or how it ended."""

    change: Change | None = None
    fault: Fault | None = None


_KINDS: dict[str, type[errors.WeftError]] = {
    kind.code: kind
    for kind in (
        errors.Invalid,
        errors.Malformed,
        errors.NotFound,
        errors.Conflict,
        errors.Stale,
        errors.Mismatch,
        errors.Exhausted,
        errors.Denied,
        errors.Unavailable,
        errors.Compacted,
    )
}


def fault_of(error: errors.WeftError) -> Fault:
    """The error as it is sent."""
    return Fault(error.code, error.message, error.field, dict(error.details))


def error_of(fault: Fault) -> errors.WeftError:
    """The error as it was raised on the other side."""
    return _KINDS.get(fault.code, errors.Unavailable)(fault.message, field=fault.field, details=fault.details)


encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode

SIGN_OF_LIFE = _LENGTH.pack(0)


def framed(frame: Frame) -> bytes:
    """A frame as it is sent."""
    body = encode(frame)
    return _LENGTH.pack(len(body)) + body


async def frames(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Frame, None]:
    """The frames of a stream that is cut at arbitrary places; signs of life are left out."""
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        start = 0
        while len(buffer) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            if length:
                yield _decode_frame(memoryview(buffer)[start + _LENGTH.size : end])
            start = end
        del buffer[:start]
