"""The messages of etcd's v3 JSON gateway that we use (etcd 3.4 and later, `rpc.proto` in JSON).

Bytes are base64 and 64-bit integers are strings in answers; msgspec reads and writes both. Zero values are left out.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Request(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Base of what we send."""


class Range(Request, frozen=True):
    """Read a key, or all in [key, range_end), as of a revision (0: now)."""

    key: bytes
    range_end: bytes = b""
    limit: int = 0
    revision: int = 0


class Compare(Request, frozen=True):
    """Holds when the last revision of the key, or of every key in the range, stands so to `mod_revision`."""

    target: Literal["MOD"]
    result: Literal["EQUAL", "LESS"]
    key: bytes
    range_end: bytes = b""
    mod_revision: int = 0


class Put(Request, frozen=True):
    """Write a value."""

    key: bytes
    value: bytes = b""
    lease: int = 0


class DeleteRange(Request, frozen=True):
    """Delete a key, or all in [key, range_end)."""

    key: bytes
    range_end: bytes = b""


class Operation(Request, frozen=True):
    """One of them."""

    request_put: Put | None = None
    request_delete_range: DeleteRange | None = None


class Txn(Request, frozen=True):
    """All operations if all compares hold."""

    compare: list[Compare] = []
    success: list[Operation] = []


class WatchCreate(Request, frozen=True):
    """What to watch, and from which revision."""

    key: bytes
    range_end: bytes
    start_revision: int


class Watch(Request, frozen=True):
    """The request that opens a watch."""

    create_request: WatchCreate


class Grant(Request, frozen=True):
    """A new lease of whole seconds."""

    TTL: int


class Lease(Request, frozen=True):
    """A lease, to keep alive or revoke."""

    ID: int


class Authenticate(Request, frozen=True):
    """Name and password for a token."""

    name: str
    password: str


class Header(msgspec.Struct, frozen=True, gc=False):
    """The revision of the store when it answered."""

    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key as it is, or as an event left it."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0


class Done(msgspec.Struct, frozen=True):
    """An answer that says no more than that it was done."""

    header: Header = Header()


class Ranged(msgspec.Struct, frozen=True):
    """A page of keys."""

    header: Header
    kvs: list[KeyValue] = []
    more: bool = False


class TxnDone(msgspec.Struct, frozen=True):
    """Whether the compares held."""

    header: Header
    succeeded: bool = False


class Granted(msgspec.Struct, frozen=True):
    """The new lease."""

    ID: int


class KeptAlive(msgspec.Struct, frozen=True):
    """The time the lease has now; none when it has ended."""

    TTL: int = 0


class Token(msgspec.Struct, frozen=True):
    """The word that stands for name and password for a while."""

    token: str = ""


class Error(msgspec.Struct, frozen=True):
    """A refusal: `code` is gRPC's (in streams it is called `grpc_code`)."""

    code: int = 0
    grpc_code: int = 0
    message: str = ""


class KeepAliveAnswer(msgspec.Struct, frozen=True):
    """One line of the keep-alive stream."""

    result: KeptAlive | None = None
    error: Error | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """A put, or a deletion."""

    kv: KeyValue
    type: Literal["PUT", "DELETE"] = "PUT"


class Watched(msgspec.Struct, frozen=True):
    """News of a watch, or of its beginning or end."""

    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[WatchEvent] = []


class WatchAnswer(msgspec.Struct, frozen=True):
    """One line of the watch stream."""

    result: Watched | None = None
    error: Error | None = None


encode = msgspec.json.Encoder().encode
