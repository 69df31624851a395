"""SQLite file of the embedded store: its schema, and the steps of a transaction. For use by one thread only.

Table `entries` is the present state. Table `log` has the events of each revision for watchers; its last row has the
store's revision. Table `leases` has the live leases. Each commit is one SQL transaction, so that the three tables are
consistent whenever the process dies.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import msgspec

from weft.domain.errors import Compacted, NotFound, Stale, Unavailable, WeftError
from weft.domain.ids import StoreKey
from weft.ports.store import (
    NEVER,
    Change,
    Compare,
    Delete,
    DeleteAll,
    Entry,
    Event,
    LeaseId,
    Listing,
    Put,
    Revision,
    RevisionEquals,
    Write,
)

T = TypeVar("T")

_APPLICATION = 0x57656674  # "Weft"
# SQLite's `user_version`. Version 1 had other store keys and members; `weft.domain.lifecycle.store_format` marks shared
# stores with the same number.
_VERSION = 2
# 0 is NEVER.
_FIRST_REVISION = 1
_HISTORY_PAGE = 500
# Bytes of history in one page for a watcher, and in the log table: large values must fill neither memory nor disk (M3).
_PAGE_BYTES = 4 << 20
HISTORY_BYTES = 64 << 20

# WITHOUT ROWID: the key is the B-tree, so that a listing by prefix is one range scan.
_SCHEMA = f"""
CREATE TABLE entries (
    key TEXT PRIMARY KEY, revision INTEGER NOT NULL, lease INTEGER, value BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX entries_by_revision ON entries (revision);
CREATE INDEX entries_by_lease ON entries (lease) WHERE lease IS NOT NULL;
CREATE TABLE log (revision INTEGER PRIMARY KEY, events BLOB NOT NULL);
CREATE TABLE leases (id INTEGER PRIMARY KEY, ttl REAL NOT NULL);
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
"""

_encode_events = msgspec.msgpack.Encoder().encode
_decode_events = msgspec.msgpack.Decoder(tuple[Event, ...]).decode


@contextmanager
def _sqlite_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise Unavailable(f"store file {path}: {error}") from error


def _after_prefix(prefix: StoreKey) -> str:
    """The first text after all keys with this prefix; keys are ASCII."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1) if prefix else "\x7f"


class StoreFile:
    """An open store file, locked against every other process."""

    def __init__(self, path: Path, *, history: int, history_bytes: int = HISTORY_BYTES) -> None:
        self._path = path
        self.history = history
        self._history_bytes = history_bytes
        self._undo = ExitStack()
        with _sqlite_errors(path), ExitStack() as undo:
            # The lock comes first and is released last.
            undo.callback(os.close, _lock(path))
            _check_format(path)
            self._sql = _connect(path)
            undo.callback(self._sql.close)
            self.revision, self._oldest = self._read_extent()
            (self.log_bytes,) = self._sql.execute("SELECT coalesce(sum(length(events)), 0) FROM log").fetchone()
            self._undo = undo.pop_all()

    def close(self) -> None:
        with _sqlite_errors(self._path):
            self._undo.close()

    def read(self, key: StoreKey) -> Entry | None:
        with _sqlite_errors(self._path):
            row = self._sql.execute(
                "SELECT CAST(value AS BLOB), revision FROM entries WHERE key = ?", (key,)
            ).fetchone()
        return None if row is None else Entry(key, row[0], row[1])

    def list_under(self, prefix: StoreKey) -> Listing:
        with _sqlite_errors(self._path):
            rows = self._sql.execute(
                "SELECT key, CAST(value AS BLOB), revision FROM entries WHERE key >= ? AND key < ? ORDER BY key",
                (prefix, _after_prefix(prefix)),
            )
            return Listing(tuple(Entry(*row) for row in rows), self.revision)

    def changes_after(self, since: Revision) -> Sequence[Change]:
        """The next page of the log after a revision; `Compacted` if some of it is deleted."""
        if since < self._oldest:
            raise Compacted(f"revision {since} compacted: history starts after {self._oldest}")
        with _sqlite_errors(self._path):
            rows = self._sql.execute(
                "SELECT revision, events FROM log WHERE revision > ? ORDER BY revision LIMIT ?", (since, _HISTORY_PAGE)
            )
            page: list[Change] = []
            size = 0
            # At least one change: a watcher must get on, however large it is.
            for revision, events in rows:
                page.append(Change(revision, _decode_events(events)))
                size += len(events)
                if size >= _PAGE_BYTES:
                    break
            return page

    def leases(self) -> Sequence[tuple[LeaseId, float]]:
        """The live leases with their time to live."""
        with _sqlite_errors(self._path):
            return [(LeaseId(lease), ttl) for lease, ttl in self._sql.execute("SELECT id, ttl FROM leases")]

    def transact(self, steps: Sequence[Callable[[Transaction], T]]) -> tuple[Sequence[T | Exception], Sequence[Change]]:
        """Execute the steps in one durable transaction; returns the result of each, and the changes.

        A step that raises a `WeftError` has written nothing and does not affect the others.
        """
        results: list[T | Exception] = []
        with _sqlite_errors(self._path):
            # IMMEDIATE takes the write lock now: a deferred upgrade could fail in the middle.
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                transaction = Transaction(self._sql, self.revision)
                for step in steps:
                    try:
                        results.append(step(transaction))
                    except WeftError as error:
                        results.append(error)
                oldest, log_bytes = self._compact(transaction.revision, self.log_bytes + transaction.log_bytes)
                self._sql.execute("COMMIT")
            except BaseException:
                # SQLite itself has rolled back already after some errors, such as a full disk.
                with suppress(sqlite3.OperationalError):
                    self._sql.execute("ROLLBACK")
                raise
        self.revision, self._oldest, self.log_bytes = transaction.revision, oldest, log_bytes
        return results, transaction.changes

    def _compact(self, revision: Revision, size: int) -> tuple[Revision, int]:
        """Delete history beyond the limits; returns the revision before the oldest that is left, and the bytes left."""
        oldest = self._oldest
        # An eighth at a time: a deletion in every transaction would double its cost.
        if revision - oldest > self.history + self.history // 8:
            oldest = revision - self.history
        freed = 0
        if size > self._history_bytes + self._history_bytes // 8:
            rows = self._sql.execute("SELECT revision, length(events) FROM log ORDER BY revision")
            # The last revision stays: the store's revision is read from it.
            for each, length in rows:
                if size - freed <= self._history_bytes or each >= revision:
                    break
                oldest, freed = max(oldest, each), freed + length
        if oldest == self._oldest:
            return oldest, size
        (deleted,) = self._sql.execute(
            "SELECT coalesce(sum(length(events)), 0) FROM log WHERE revision <= ?", (oldest,)
        ).fetchone()
        self._sql.execute("DELETE FROM log WHERE revision <= ?", (oldest,))
        return oldest, size - deleted

    def _read_extent(self) -> tuple[Revision, Revision]:
        first, last = self._sql.execute("SELECT min(revision), max(revision) FROM log").fetchone()
        return (_FIRST_REVISION, _FIRST_REVISION) if last is None else (last, first - 1)


class Transaction:
    """The steps inside one SQL transaction. Compares see the writes of earlier steps."""

    def __init__(self, sql: sqlite3.Connection, revision: Revision) -> None:
        self._sql = sql
        self.revision = revision
        self.changes: list[Change] = []
        # Bytes that its steps have added to the log.
        self.log_bytes = 0

    def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        for compare in compares:
            self._check(compare)
        for write in writes:
            if isinstance(write, Put) and write.lease is not None:
                self._check_lease(write.lease)
        return self._write(writes)

    def grant(self, lease: LeaseId, ttl: float) -> Revision:
        self._sql.execute("INSERT INTO leases VALUES (?, ?)", (lease, ttl))
        return self.revision

    def end(self, lease: LeaseId) -> Revision:
        """Delete a lease and its keys."""
        self._sql.execute("DELETE FROM leases WHERE id = ?", (lease,))
        rows = self._sql.execute("SELECT key FROM entries WHERE lease = ? ORDER BY key", (lease,)).fetchall()
        return self._write([Delete(key) for (key,) in rows])

    def _check(self, compare: Compare) -> None:
        if isinstance(compare, RevisionEquals):
            row = self._sql.execute("SELECT revision FROM entries WHERE key = ?", (compare.key,)).fetchone()
            found = NEVER if row is None else row[0]
            if found != compare.revision:
                raise Stale(f"{compare.key} is at revision {found}, not {compare.revision}")
            return
        # By the revision index: few keys were put since a recent revision, however many the prefix has.
        row = self._sql.execute(
            "SELECT key, revision FROM entries INDEXED BY entries_by_revision"
            " WHERE revision > ? AND key >= ? AND key < ? LIMIT 1",
            (compare.since, compare.prefix, _after_prefix(compare.prefix)),
        ).fetchone()
        if row is not None:
            raise Stale(f"{row[0]} was put at revision {row[1]}, after {compare.since}")

    def _check_lease(self, lease: LeaseId) -> None:
        if self._sql.execute("SELECT 1 FROM leases WHERE id = ?", (lease,)).fetchone() is None:
            raise NotFound(f"lease {lease} has expired")

    def _write(self, writes: Sequence[Write]) -> Revision:
        revision = self.revision + 1
        events: list[Event] = []
        for write in writes:
            match write:
                case Put():
                    self._sql.execute(
                        "INSERT OR REPLACE INTO entries (key, revision, lease, value) VALUES (?, ?, ?, ?)",
                        (write.key, revision, write.lease, write.value),
                    )
                    events.append(Event(write.key, write.value))
                case Delete():
                    if self._sql.execute("DELETE FROM entries WHERE key = ?", (write.key,)).rowcount:
                        events.append(Event(write.key, None))
                case DeleteAll():
                    rows = self._sql.execute(
                        "DELETE FROM entries WHERE key >= ? AND key < ? RETURNING key",
                        (write.prefix, _after_prefix(write.prefix)),
                    )
                    events.extend(Event(StoreKey(key), None) for (key,) in rows.fetchall())
        if events:
            encoded = _encode_events(events)
            self._sql.execute("INSERT INTO log VALUES (?, ?)", (revision, encoded))
            self.log_bytes += len(encoded)
            self.changes.append(Change(revision, tuple(events)))
            self.revision = revision
        return self.revision


def _lock(path: Path) -> int:
    """Lock the store file against other processes, or raise `Unavailable`."""
    # A separate file: closing any descriptor of the store file would drop SQLite's POSIX locks on it.
    lock = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise Unavailable(f"store file {path} is in use by another process; only one may open it") from error
    return lock


def _check_format(path: Path) -> None:
    """`Unavailable` unless the file is an intact store of this version; never changes what is committed in it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    # A process that died within a transaction left a journal, which SQLite rolls back before the first read.
    mode = "rw" if path.with_name(path.name + "-journal").exists() else "ro"
    sql = sqlite3.connect(f"file:{quote(str(path))}?mode={mode}", uri=True)
    try:
        (application,) = sql.execute("PRAGMA application_id").fetchone()
        (version,) = sql.execute("PRAGMA user_version").fetchone()
        (tables,) = sql.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if (application, version, tables) == (0, 0, 0):
            return  # its process died before it created the schema
        if application != _APPLICATION:
            raise Unavailable(f"store file {path} is a database of another program")
        if version < _VERSION:
            raise Unavailable(
                f"store file {path} has version {version}, this Weft reads version {_VERSION}: "
                "start with an empty --data-dir"
            )
        if version > _VERSION:
            raise Unavailable(
                f"store file {path} has version {version}, this Weft reads version {_VERSION}: use a newer Weft"
            )
        (verdict,) = sql.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise Unavailable(f"store file {path} is damaged: {verdict}")
    finally:
        sql.close()


def _decode_text(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def _connect(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # Others may have written to the file: a key that is not UTF-8 is none of ours, and costs nothing but itself. So
    # values are read as blobs, too, whatever their type: SQLite stores numbers and texts in such a column.
    sql.text_factory = _decode_text
    try:
        sql.execute("PRAGMA journal_mode = WAL")
        # FULL: fsync of the WAL at every commit; NORMAL could lose acknowledged commits in a power failure.
        sql.execute("PRAGMA synchronous = FULL")
        (tables,) = sql.execute("SELECT count(*) FROM sqlite_master").fetchone()
        # Schema and version in one transaction: a crash leaves an empty file or a complete one.
        if not tables:
            sql.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
    except BaseException:
        sql.close()
        raise
    return sql
