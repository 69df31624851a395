"""Decode and validate what the store holds. The only way from stored bytes to values.

Whatever is in the store may be garbage: a store can be shared, and a node may be hostile. A document counts only if it
is decoded *and* passes the rules that REST applies to users' writes. Everything else is `Unreadable`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from weft.domain import kinds, model
from weft.domain.codec import Read, read
from weft.domain.errors import Malformed, Unavailable, WeftError
from weft.domain.ids import StoreKey
from weft.domain.store_keys import (
    AddressClaimKey,
    AliveKey,
    AppliedKey,
    BlockKey,
    NumberClaimKey,
    ObjectKey,
    ParsedKey,
    SingletonKey,
    UnparsedKey,
)
from weft.domain.validation import check

# Characters of a reason: it may quote what is stored.
_MAX_REASON = 300

# The holder of a claim and the owner of a block that cannot be read. Neither is a valid holder or node name, so nobody
# uses what they hold: treated as absent, an address or tag would look free and every commit that takes it would fail.
UNREADABLE_CLAIM = model.Claim(holder="unreadable claim")
UNREADABLE_BLOCK = model.Block(owner="unreadable block")


class Unreadable(NamedTuple):
    """A key of the store that cannot be read, or whose document cannot."""

    # The kind for the metric `weft_store_decode_errors_total`: one of few, whatever is stored.
    kind: str
    reason: str
    revision: int
    # Whether a newer Weft wrote it. Such a document is never replaced.
    newer: bool = False


def decode_stored(parsed: ParsedKey, value: bytes) -> Read[Any] | None:
    """The valid document under a key; None for a key without one. Raises `WeftError` or `ValueError` for any other."""
    match parsed:
        case ObjectKey(kind, parts):
            found: Read[Any] = read(kind.type, value)
            # Checked before anything else uses the value: its names index the snapshot.
            check(found.value)
            if kind.key_parts(found.value) != parts:
                raise Malformed(f"the document under this key is that of {kind.name} {kind.key_text(found.value)!r}")
            return found
        case AddressClaimKey() | NumberClaimKey():
            return _checked(read(model.Claim, value))
        case BlockKey():
            return _checked(read(model.Block, value))
        case AppliedKey():
            return _checked(read(model.SyncStatus, value))
        case UnparsedKey(reason) if reason:
            raise Malformed(reason)
    return None


def _checked(found: Read[Any]) -> Read[Any]:
    check(found.value)
    return found


def unreadable(parsed: ParsedKey, key: StoreKey, error: Exception, *, revision: int) -> Unreadable:
    """The fault of a key, from the error of its decoding."""
    reason = error.message if isinstance(error, WeftError) else str(error)
    printable = "".join(letter if letter.isprintable() else "?" for letter in reason[:_MAX_REASON])
    return Unreadable(_kind_name(parsed, key), printable, revision, newer=isinstance(error, Unavailable))


def _kind_name(parsed: ParsedKey, key: StoreKey) -> str:
    match parsed:
        case ObjectKey(kind, _):
            return kind.name
        case AddressClaimKey() | NumberClaimKey():
            return "claim"
        case BlockKey():
            return "block"
        case AliveKey() | AppliedKey():
            return "status"
        case SingletonKey():
            return "singleton"
    known = kinds.BY_PREFIX.get(key.split("/", 1)[0])
    return known.name if known else "key"
