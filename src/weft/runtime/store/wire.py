"""Messages between the remote store and its server: msgpack bodies over HTTP.

Each call is a POST to `/store/v1/<call>`. The response to a watch is a sequence of frames: four bytes of length,
big-endian, then a `Frame`. A length of zero is a heartbeat.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import msgspec

from weft.domain import errors
from weft.domain.codec import UNDECODABLE
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Compare, LeaseId, Revision, Write

PREFIX = "/store/v1"
NODE_HEADER = "X-Weft-Node"
MEDIA_TYPE = "application/msgpack"
# Seconds after which a watch without events sends a heartbeat.
HEARTBEAT = 1.0

# Network byte order.
_LENGTH = struct.Struct(">I")
# Bytes of a frame: far above any commit, so that a broken length does not fill the memory of an agent.
MAX_FRAME = 128 << 20


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
    """Grant a lease."""

    ttl: float


class LeaseRequest(msgspec.Struct, frozen=True):
    """Keep a lease alive, or revoke it."""

    lease: LeaseId


class Fault(msgspec.Struct, frozen=True):
    """An error in transit."""

    code: str
    message: str
    field: str = ""
    details: dict[str, Any] = {}


# omit_defaults: most frames have a change and no fault.
class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of a watch, or the error that ended it."""

    change: Change | None = None
    fault: Fault | None = None


# DatapathFault and Behind never cross the store protocol.
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
        errors.Limited,
    )
}


def fault_of(error: errors.WeftError) -> Fault:
    """Encode an error."""
    return Fault(error.code, error.message, error.field, dict(error.details))


def error_of(fault: Fault) -> errors.WeftError:
    """Decode an error; an unknown code becomes `Unavailable`, which clients retry."""
    return _KINDS.get(fault.code, errors.Unavailable)(fault.message, field=fault.field, details=fault.details)


encode = msgspec.msgpack.Encoder().encode
_decode_frame = msgspec.msgpack.Decoder(Frame).decode

HEARTBEAT_FRAME = _LENGTH.pack(0)


def framed(frame: Frame) -> bytes:
    """Encode a frame with its length."""
    body = encode(frame)
    return _LENGTH.pack(len(body)) + body


async def frames(pieces: AsyncIterator[bytes]) -> AsyncGenerator[Frame, None]:
    """Decode the frames of a stream that arrives in arbitrary pieces; heartbeats are skipped.

    `Unavailable` for a frame that cannot be decoded: another connection may be better.
    """
    buffer = bytearray()
    async for piece in pieces:
        buffer += piece
        start = 0
        while len(buffer) >= start + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise errors.Unavailable(f"a frame of {length} bytes is more than {MAX_FRAME}")
            end = start + _LENGTH.size + length
            if len(buffer) < end:
                break
            if length:
                yield _frame(buffer, start + _LENGTH.size, end)
            start = end
        # Once per piece, not once per frame: deletion moves the rest of the buffer.
        del buffer[:start]


def _frame(buffer: bytearray, begin: int, end: int) -> Frame:
    try:
        # A memoryview avoids a copy of the frame.
        return _decode_frame(memoryview(buffer)[begin:end])
    except UNDECODABLE as error:
        raise errors.Unavailable(f"a frame cannot be decoded: {error}") from error
