"""What is said to the store and what it says: compares and writes, listings and changes (contract: `ports.store`)."""

from __future__ import annotations

from typing import NewType

import msgspec

from weft.domain.ids import StoreKey

Revision = int
LeaseId = NewType("LeaseId", int)

# The revision of a key that does not exist.
NEVER: Revision = 0
# Bytes of a value that any store takes: etcd takes 1.5 MiB in a request, keys and compares included.
LARGEST_VALUE = 1_400_000


class RevisionEquals(msgspec.Struct, frozen=True, gc=False, tag="at"):
    """Holds while the key's last put has this revision; `NEVER` holds while the key is absent."""

    key: StoreKey
    revision: Revision


class PrefixUnchangedSince(msgspec.Struct, frozen=True, gc=False, tag="quiet"):
    """Holds while no key under the prefix was put after `since`. Deletions do not disturb it."""

    prefix: StoreKey
    since: Revision


class Put(msgspec.Struct, frozen=True, gc=False, tag="put"):
    """Write a value; with a lease the key goes when the lease ends."""

    key: StoreKey
    value: bytes
    lease: LeaseId | None = None


class Delete(msgspec.Struct, frozen=True, gc=False, tag="delete"):
    """Remove a key; absent already is fine."""

    key: StoreKey


class DeleteAll(msgspec.Struct, frozen=True, gc=False, tag="delete-all"):
    """Remove every key under a prefix."""

    prefix: StoreKey


Compare = RevisionEquals | PrefixUnchangedSince
Write = Put | Delete | DeleteAll


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A key with its value and the revision of its last put."""

    key: StoreKey
    value: bytes
    revision: Revision


class Listing(msgspec.Struct, frozen=True):
    """All entries under a prefix as of `revision`."""

    entries: tuple[Entry, ...]
    revision: Revision


class Event(msgspec.Struct, frozen=True, gc=False):
    """A key was put, or deleted (`value` is None)."""

    key: StoreKey
    value: bytes | None


class Change(msgspec.Struct, frozen=True):
    """All events of one revision under the watched prefix."""

    revision: Revision
    events: tuple[Event, ...]
