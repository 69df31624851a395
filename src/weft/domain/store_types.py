"""Messages of the store: compares and writes, listings and changes (contract: `weft.ports.store`)."""

from __future__ import annotations

from typing import NewType

import msgspec

from weft.domain.ids import StoreKey

Revision = int
LeaseId = NewType("LeaseId", int)

# The revision of a key that does not exist.
NEVER: Revision = 0
# Bytes of a value that every store accepts: etcd limits a request to 1.5 MiB, keys and compares included.
LARGEST_VALUE = 1_400_000


class RevisionEquals(msgspec.Struct, frozen=True, gc=False, tag="at"):
    """Holds if the last put of the key has this revision; `NEVER` holds if the key is absent."""

    key: StoreKey
    revision: Revision


class PrefixUnchangedSince(msgspec.Struct, frozen=True, gc=False, tag="quiet"):
    """Holds if no key under the prefix was put after `since`. Deletions do not count: etcd cannot compare them."""

    prefix: StoreKey
    since: Revision


class Put(msgspec.Struct, frozen=True, gc=False, tag="put"):
    """Write a value; with a lease the key is deleted when the lease expires."""

    key: StoreKey
    value: bytes
    lease: LeaseId | None = None


class Delete(msgspec.Struct, frozen=True, gc=False, tag="delete"):
    """Delete a key; an absent one is fine."""

    key: StoreKey


class DeleteAll(msgspec.Struct, frozen=True, gc=False, tag="delete-all"):
    """Delete every key under a prefix."""

    prefix: StoreKey


# The tags of the structs are part of the wire protocol of the remote store.
Compare = RevisionEquals | PrefixUnchangedSince
Write = Put | Delete | DeleteAll


# gc=False: values hold no cycles, and a mirror keeps hundreds of thousands of them.
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
