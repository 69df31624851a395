"""Encode and decode stored documents: versioned JSON, `{"v": 1, "o": {…}}`.

Documents of older versions are upgraded member by member before they are decoded. Documents of a newer Weft with our
version are decoded without the members that we do not know; these are kept, and written back with the next update. So a
new member that an older Weft can ignore is simply added. A member that changes the meaning of others requires a higher
version: no document is ever decoded partially.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from weft.domain.errors import Invalid, Malformed, Unavailable
from weft.domain.model import Value

VERSION = 1
# What msgspec raises for JSON or MessagePack that it cannot decode: besides its own errors, UnicodeDecodeError for text
# that is not UTF-8, and RecursionError for deep nesting, which exhausts the stack of the decoder.
UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
NOT_JSON = UNDECODABLE
T = TypeVar("T", bound=Value)
S = TypeVar("S", bound=msgspec.Struct)

Upgrade = Callable[[dict[str, object]], dict[str, object]]
# (type name, version) -> the function that upgrades a document of this version to the next.
UPGRADES: Mapping[tuple[str, int], Upgrade] = {}


class Read(NamedTuple, Generic[T]):
    """The value of a stored document, and the members that only a newer Weft knows."""

    value: T
    unknown: Mapping[str, object]


class _Document(msgspec.Struct, Generic[T]):
    v: int
    o: T


class _Unread(msgspec.Struct):
    v: int
    o: dict[str, object]


# Deterministic, so that equal values are equal bytes: stores and watches then see no change.
_encoder = msgspec.json.Encoder(order="deterministic")
_head = b'{"v":%d,"o":' % VERSION


@cache
# Building a decoder compiles the type; each is used for every document of its kind.
def _decoder(kind: type[T]) -> msgspec.json.Decoder[_Document[T]]:
    return msgspec.json.Decoder(_Document[kind])  # type: ignore[valid-type]


@cache
def _plain_decoder(kind: type[S]) -> msgspec.json.Decoder[S]:
    return msgspec.json.Decoder(kind)


def encode(value: Value) -> bytes:
    """The stored document of a value."""
    return _head + _encoder.encode(value) + b"}"


def decode(kind: type[T], data: bytes) -> T:
    """The value of a stored document; errors as in `read`."""
    return read(kind, data).value


def read(kind: type[T], data: bytes, *, upgrades: Mapping[tuple[str, int], Upgrade] = UPGRADES) -> Read[T]:
    """A stored document; `Unavailable` when only a newer Weft reads its version, `Malformed` when it is none."""
    try:
        document = _decoder(kind).decode(data)
    except NOT_JSON as error:
        return _read_other(kind, data, upgrades, error)
    # The common case decodes in one pass; everything else takes the slow path.
    return Read(document.o, {}) if document.v == VERSION else _read_other(kind, data, upgrades, None)


def _read_other(
    kind: type[T], data: bytes, upgrades: Mapping[tuple[str, int], Upgrade], reason: Exception | None
) -> Read[T]:
    """Decode a document that is not exactly as this version writes it."""
    try:
        document = msgspec.json.decode(data, type=_Unread)
    except NOT_JSON as error:
        raise Malformed(f"stored {kind.__name__} is not a document: {error}") from error
    if document.v < 0:
        raise Malformed(f"stored {kind.__name__} has version {document.v}, which does not exist")
    if document.v > VERSION:
        raise Unavailable(
            f"stored {kind.__name__} has version {document.v}; this Weft reads up to {VERSION}: upgrade it"
        )
    members = document.o
    # One version after the other, so that each upgrade only knows its predecessor.
    for version in range(document.v, VERSION):
        upgrade = upgrades.get((kind.__name__, version))
        members = upgrade(members) if upgrade else members
    unknown = {name: members[name] for name in members.keys() - set(kind.__struct_encode_fields__)}
    try:
        value: T = msgspec.convert({name: members[name] for name in members.keys() - unknown.keys()}, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Malformed(f"stored {kind.__name__} is not readable: {error}") from (reason or error)
    return Read(value, unknown)


def with_unknown(data: bytes, unknown: Mapping[str, object]) -> bytes:
    """A document of this version with members that only a newer Weft knows."""
    return _head + _encoder.encode({**unknown, **msgspec.json.decode(data, type=_Unread).o}) + b"}"


def decode_input(kind: type[S], data: bytes) -> S:
    """Decode a request body, which has no envelope; `Malformed` for invalid JSON, `Invalid` names the wrong member."""
    try:
        value: S = _plain_decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _as_invalid(error, kind) from error
    except NOT_JSON as error:
        raise Malformed(f"the body is not JSON: {error}") from error
    return value


def convert_input(kind: type[T], members: Mapping[str, object]) -> T:
    """As `decode_input`, from parsed JSON members."""
    try:
        converted: T = msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        raise _as_invalid(error, kind) from error
    return converted


def _as_invalid(error: msgspec.ValidationError, kind: type[msgspec.Struct]) -> Invalid:
    """Find the member in the message of msgspec: "… - at `$.ports[0]`" or "Object contains unknown field `x`"."""
    # msgspec has no structured errors; a test pins these texts.
    text = str(error)
    reason, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    for lead in ("Object contains unknown field `", "Object missing required field `"):
        if reason.startswith(lead):
            name = reason.removeprefix(lead).rstrip("`")
            field = f"{field}.{name}" if field else name
            reason = "unknown member: remove it" if "unknown" in lead else "missing: it is required"
    if reason.startswith("Invalid enum value") and (choices := _choices(kind, field)):
        reason = f"{reason.removeprefix('Invalid enum value ')} is not one of {', '.join(map(repr, choices))}"
    return Invalid(f"{field or 'body'}: {reason}", field=field)


def _choices(kind: type[msgspec.Struct], name: str) -> tuple[object, ...]:
    """The allowed values of a member with a Literal type."""
    attributes = dict(zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True))
    hint = get_type_hints(kind).get(attributes.get(name, ""))
    return tuple(choice for choice in get_args(hint) if choice) if get_origin(hint) is Literal else ()


def members(value: Value) -> dict[str, Any]:
    """The JSON members of a value for output: without zero values, but with defaults that mean something."""
    shown = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    pairs = ((name, msgspec.to_builtins(getattr(value, attribute))) for name, attribute in shown)
    return {name: member for name, member in pairs if member}
