"""Value <-> versioned JSON document, as kept in the store: `{"v": 1, "o": {…}}`.

Older versions are brought up to date member by member before they are read. Of a newer Weft's documents those are read
that have our version, without the members that we do not know; these are kept aside, for whoever writes the document
again. So a new member that an older Weft may pass over is simply added, and one without which the others would mean
something else raises the version: nothing is ever read as half of what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from weft.domain.errors import Invalid, Malformed, Unavailable
from weft.domain.model import Value

VERSION = 1
# What decoding raises for bytes that are no JSON, or none that can be taken in.
NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
T = TypeVar("T", bound=Value)
S = TypeVar("S", bound=msgspec.Struct)

Upgrade = Callable[[dict[str, object]], dict[str, object]]
# (type name, version) -> what makes a document of the next version of it.
UPGRADES: Mapping[tuple[str, int], Upgrade] = {}


class Read(NamedTuple, Generic[T]):
    """What a stored document says, and the members of it that only a newer Weft knows."""

    value: T
    unknown: Mapping[str, object]


class _Document(msgspec.Struct, Generic[T]):
    v: int
    o: T


class _Unread(msgspec.Struct):
    v: int
    o: dict[str, object]


_encoder = msgspec.json.Encoder(order="deterministic")
_head = b'{"v":%d,"o":' % VERSION


@cache
def _decoder(kind: type[T]) -> msgspec.json.Decoder[_Document[T]]:
    return msgspec.json.Decoder(_Document[kind])  # type: ignore[valid-type]


@cache
def _plain_decoder(kind: type[S]) -> msgspec.json.Decoder[S]:
    return msgspec.json.Decoder(kind)


def encode(value: Value) -> bytes:
    """The stored form."""
    return _head + _encoder.encode(value) + b"}"


def decode(kind: type[T], data: bytes) -> T:
    """The value of a stored document; errors as `read` has them."""
    return read(kind, data).value


def read(kind: type[T], data: bytes, *, upgrades: Mapping[tuple[str, int], Upgrade] = UPGRADES) -> Read[T]:
    """A stored document; `Unavailable` when only a newer Weft reads its version, `Malformed` when it is none."""
    try:
        document = _decoder(kind).decode(data)
    except NOT_JSON as error:
        return _read_other(kind, data, upgrades, error)
    return Read(document.o, {}) if document.v == VERSION else _read_other(kind, data, upgrades, None)


def _read_other(
    kind: type[T], data: bytes, upgrades: Mapping[tuple[str, int], Upgrade], reason: Exception | None
) -> Read[T]:
    """What is not exactly as we write it."""
    try:
        document = msgspec.json.decode(data, type=_Unread)
    except NOT_JSON as error:
        raise Malformed(f"stored {kind.__name__} is not a document: {error}") from error
    if document.v < 0:
        raise Malformed(f"stored {kind.__name__} has version {document.v}, which never was")
    if document.v > VERSION:
        raise Unavailable(
            f"stored {kind.__name__} has version {document.v}; this Weft reads up to {VERSION}: upgrade it"
        )
    members = document.o
    for version in range(document.v, VERSION):
        upgrade = upgrades.get((kind.__name__, version))
        members = upgrade(members) if upgrade else members
    unknown = {name: members[name] for name in members.keys() - set(kind.__struct_encode_fields__)}
    try:
        value: T = msgspec.convert({name: members[name] for name in members.keys() - unknown.keys()}, kind)
    except msgspec.ValidationError as error:
        raise Malformed(f"stored {kind.__name__} is not readable: {error}") from (reason or error)
    return Read(value, unknown)


def with_unknown(data: bytes, unknown: Mapping[str, object]) -> bytes:
    """A document of ours with members that only a newer Weft knows."""
    return _head + _encoder.encode({**unknown, **msgspec.json.decode(data, type=_Unread).o}) + b"}"


def decode_input(kind: type[S], data: bytes) -> S:
    """A value from outside, without envelope; `Malformed` for JSON that is none, `Invalid` with the member at fault."""
    try:
        value: S = _plain_decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _as_invalid(error, kind) from error
    except NOT_JSON as error:
        raise Malformed(f"the body is not JSON: {error}") from error
    return value


def convert_input(kind: type[T], members: Mapping[str, object]) -> T:
    """As `decode_input`, from members already parsed."""
    try:
        converted: T = msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        raise _as_invalid(error, kind) from error
    return converted


def _as_invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> Invalid:
    """msgspec says "… - at `$.ports[0]`" or "Object contains unknown field `x`": find the member's name in it."""
    text = str(error)
    reason, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    for lead in ("Object contains unknown field `", "Object missing required field `"):
        if reason.startswith(lead):
            name = reason.removeprefix(lead).rstrip("`")
            field = f"{field}.{name}" if field else name
            reason = "unknown member: remove it" if "unknown" in lead else "missing: it is required"
    if reason.startswith("Invalid enum value") and (choices := _choices(kind, field)):
        reason = f"{reason.removeprefix('Invalid enum value ')} is none of {', '.join(map(repr, choices))}"
    return Invalid(f"{field or 'body'}: {reason}", field=field)


def _choices(kind: type[msgspec.Struct], name: str) -> tuple[object, ...]:
    """What a member may be, where that is a list of words."""
    attributes = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    hint = get_type_hints(kind).get(attributes.get(name, ""))
    return tuple(choice for choice in get_args(hint) if choice) if get_origin(hint) is Literal else ()


def members(value: Value) -> dict[str, Any]:
    """The JSON members of a value as people see them: zero values left out, defaults that mean something shown."""
    shown = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    pairs = ((name, msgspec.to_builtins(getattr(value, attribute))) for name, attribute in shown)
    return {name: member for name, member in pairs if member}
