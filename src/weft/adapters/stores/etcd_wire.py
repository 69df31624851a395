"""Messages of etcd's v3 JSON gateway (etcd 3.4 and later; `rpc.proto` in JSON).

Bytes are base64, and 64-bit integers are strings in responses; msgspec handles both. Zero values are omitted.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Request(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Base of all requests."""


# limit and revision page through a large prefix at one revision.
class Range(Request, frozen=True):
    """Read a key, or all in [key, range_end), as of a revision (0: now)."""

    key: bytes
    range_end: bytes = b""
    limit: int = 0
    # 0: the latest.
    revision: int = 0


class Compare(Request, frozen=True):
    """Holds if mod_revision of the key, or of every key in the range, is EQUAL to or LESS than this one."""

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
    """One operation of a transaction; exactly one member is set (a protobuf oneof)."""

    request_put: Put | None = None
    request_delete_range: DeleteRange | None = None


class Txn(Request, frozen=True):
    """Executes all operations if all compares hold."""

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
    """Grant a lease of whole seconds."""

    # etcd's spelling.
    TTL: int


class Lease(Request, frozen=True):
    """Keep a lease alive, or revoke it."""

    ID: int


class Authenticate(Request, frozen=True):
    """Name and password for a token."""

    name: str
    password: str


PermissionType = Literal["READ", "WRITE", "READWRITE"]


class Permission(Request, frozen=True):
    """The permission of a role on a key, or on [key, range_end). As READ is zero, etcd leaves it out."""

    key: bytes
    range_end: bytes = b""
    permType: PermissionType = "READ"  # noqa: N815  etcd's spelling


class Nothing(Request, frozen=True):
    """A request without members."""


class Named(Request, frozen=True):
    """A role to add, or a user to read."""

    name: str


class RoleRead(Request, frozen=True):
    """A role to read."""

    role: str


class RoleGrant(Request, frozen=True):
    """Grant a permission to a role."""

    name: str
    perm: Permission


class RoleRevoke(Request, frozen=True):
    """Revoke the permission of a role on exactly this range."""

    role: str
    key: bytes
    range_end: bytes = b""


class UserAdd(Request, frozen=True):
    """Create a user."""

    name: str
    password: str


class UserGrant(Request, frozen=True):
    """Grant a role to a user."""

    user: str
    role: str


# Other members of the header (cluster, member, raft term) are ignored.
class Header(msgspec.Struct, frozen=True, gc=False):
    """The revision of the store at the response."""

    revision: int = 0


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key with its value and revision, in a range or an event."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0


class Done(msgspec.Struct, frozen=True):
    """A response without content."""

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
    """The remaining TTL; 0 for an expired lease."""

    TTL: int = 0


class Token(msgspec.Struct, frozen=True):
    """The authentication token."""

    token: str = ""


class RoleAnswer(msgspec.Struct, frozen=True):
    """The permissions of a role."""

    perm: list[Permission] = []


# The response for one user has its roles, like the list of all roles.
class Names(msgspec.Struct, frozen=True):
    """The names of users or roles."""

    users: list[str] = []
    roles: list[str] = []


class Error(msgspec.Struct, frozen=True):
    """An error with its gRPC code, which is called `grpc_code` in streams."""

    code: int = 0
    grpc_code: int = 0
    message: str = ""


# The gateway wraps each message of a stream in `result` or `error`.
class KeepAliveAnswer(msgspec.Struct, frozen=True):
    """One line of the keep-alive stream."""

    result: KeptAlive | None = None
    error: Error | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """A put, or a deletion."""

    kv: KeyValue
    type: Literal["PUT", "DELETE"] = "PUT"


class Watched(msgspec.Struct, frozen=True):
    """A response of a watch: created, canceled, or events."""

    header: Header = Header()
    # The first response of a watch; it shows that the watch is established.
    created: bool = False
    canceled: bool = False
    # Set if the start revision is compacted.
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[WatchEvent] = []


class WatchAnswer(msgspec.Struct, frozen=True):
    """One line of the watch stream."""

    result: Watched | None = None
    error: Error | None = None


# Struct bytes are encoded as base64.
encode = msgspec.json.Encoder().encode
