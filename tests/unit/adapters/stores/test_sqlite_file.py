"""A file that is not a sound store of ours is refused with its name and the reason, and not a byte of it is changed."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from weft.adapters.stores.sqlite_file import StoreFile, Transaction
from weft.domain.errors import Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import NEVER, Put, Revision, RevisionEquals

A = StoreKey("a")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def fill(path: Path, *, keys: int = 1) -> None:
    def put(transaction: Transaction) -> Revision:
        return transaction.commit([], [Put(StoreKey(f"{transaction.revision}"), bytes(2_000))])

    with closing(StoreFile(path, history=1_000)) as file:
        for _ in range(keys):
            file.transact([put])


def check_refused(path: Path, *, words: str) -> None:
    before = path.read_bytes()
    with pytest.raises(Unavailable, match=words) as caught:
        StoreFile(path, history=1_000)
    assert str(path) in caught.value.message
    assert path.read_bytes() == before


def test_what_is_no_database_is_refused(path: Path) -> None:
    path.write_text("This is a letter to a friend.\n" * 100)
    check_refused(path, words="not a database")


def test_a_database_of_another_program_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE precious (data)")
    check_refused(path, words="another program")


@pytest.mark.parametrize(
    ("version", "words"),
    [(1, "version 1, .*empty --data-dir"), (99, "version 99, .*newer Weft")],
)
def test_a_store_of_another_version_is_refused_with_the_remedy(path: Path, version: int, words: str) -> None:
    fill(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA user_version = {version}")
    check_refused(path, words=words)


@pytest.mark.parametrize("page", [1, 3, 5, 8])
def test_a_damaged_file_is_refused(path: Path, page: int) -> None:
    fill(path, keys=20)
    data = bytearray(path.read_bytes())
    data[page * 4_096 : (page + 1) * 4_096] = b"\xff" * 4_096
    path.write_bytes(data)
    check_refused(path, words="damaged|malformed")


def test_a_truncated_file_is_refused(path: Path) -> None:
    fill(path, keys=20)
    path.write_bytes(path.read_bytes()[:20_000])
    check_refused(path, words="damaged|malformed")


def test_a_refused_file_can_be_opened_when_it_is_repaired(path: Path) -> None:
    """The lock is given back, too."""
    path.write_text("not yet")
    check_refused(path, words="not a database")
    path.unlink()
    fill(path)


@pytest.mark.parametrize("content", [None, b""])
def test_an_absent_or_empty_file_becomes_a_store(path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    fill(path)
    with closing(StoreFile(path, history=1_000)) as file:
        assert file.revision == 2


def test_each_step_of_a_transaction_has_its_own_verdict(path: Path) -> None:
    with closing(StoreFile(path, history=1_000)) as file:
        outcomes, changes = file.transact(
            [
                lambda transaction: transaction.commit([RevisionEquals(A, NEVER)], [Put(A, b"1")]),
                lambda transaction: transaction.commit([RevisionEquals(A, NEVER)], [Put(A, b"2")]),
                lambda transaction: transaction.commit([RevisionEquals(A, 2)], [Put(A, b"3")]),
            ]
        )
        assert (outcomes[0], outcomes[2]) == (2, 3)
        assert isinstance(outcomes[1], Stale)
        assert [change.revision for change in changes] == [2, 3]


def test_H2_values_of_other_types_and_keys_that_are_not_utf8_cost_only_themselves(path: Path) -> None:
    """Somebody wrote to the file by hand: netmaster must read the rest, and not end."""
    fill(path)
    with closing(sqlite3.connect(path)) as sql, sql:
        rows = [("'b'", "5"), ("'c'", "'text'"), ("CAST(x'64ff' AS TEXT)", "x'00'"), ("x'ff'", "x'00'")]
        for key, value in rows:
            sql.execute(f"INSERT INTO entries (key, revision, value) VALUES ({key}, 2, {value})")
    with closing(StoreFile(path, history=1_000)) as file:
        found = {entry.key: entry.value for entry in file.list_under(StoreKey("")).entries}
        assert {key: found[StoreKey(key)] for key in ("b", "c", "d\\xff")} == {"b": b"5", "c": b"text", "d\\xff": b"\0"}
        assert found[StoreKey("1")] == bytes(2_000)
        entry = file.read(StoreKey("b"))
        assert entry is not None
        assert entry.value == b"5"
