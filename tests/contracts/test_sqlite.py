"""The store contract on the embedded store, and the safety of its file."""

from __future__ import annotations

import asyncio
import resource
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from weft.adapters.stores.sqlite import open_store
from weft.adapters.stores.sqlite_file import Transaction
from weft.domain.errors import Unavailable
from weft.domain.ids import StoreKey
from weft.lab.waiting import soon
from weft.ports.store import Delete, Event, LeaseId, Put, Revision, RevisionEquals, Store
from weft.runtime.store.mirror import EVERYTHING
from weft.testing.store_contract import CompactionContract, StoreContract, take

A, B = StoreKey("a"), StoreKey("b")


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
async def short_store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "short.db", history=50) as opened:
        yield opened


class TestSqlite(StoreContract):
    pass


class TestSqliteCompaction(CompactionContract):
    pass


class TestFile:
    """The file is durable, is opened by one process at a time, and is never corrupted."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "store.db"

    async def write_three(self, path: Path) -> Revision:
        async with open_store(path) as store:
            await store.commit([], [Put(A, b"1"), Put(B, b"2")])
            return await store.commit([], [Delete(B)])

    async def test_state_survives_a_close(self, path: Path) -> None:
        revision = await self.write_three(path)
        async with open_store(path) as store:
            listing = await store.list(EVERYTHING)
            assert [entry.key for entry in listing.entries] == [A]
            assert listing.revision == revision
            async with aclosing(store.watch(EVERYTHING, 1)) as changes:
                assert [len(change.events) for change in await take(changes, 2)] == [2, 1]
            assert await store.commit([], [Put(B, b"")]) > revision

    async def test_a_revision_is_not_reused_after_compaction_and_close(self, path: Path) -> None:
        async with open_store(path, history=1) as store:
            for _ in range(10):
                revision = await store.commit([], [Put(A, b"")])
            await store.commit([], [Delete(A)])
        async with open_store(path, history=1) as store:
            assert (await store.list(EVERYTHING)).revision == revision + 1
            assert await store.commit([], [Put(A, b"")]) == revision + 2

    async def test_history_older_than_memory_is_read_from_the_file(self, path: Path) -> None:
        async with open_store(path) as store:
            for _ in range(30):
                await asyncio.gather(*(store.commit([], [Put(StoreKey(f"{n}"), b"")]) for n in range(50)))
        async with open_store(path) as store, aclosing(store.watch(EVERYTHING, 1)) as changes:
            seen = await take(changes, 1_500)
            assert [change.revision for change in seen] == list(range(2, 1_502))
            revision = await store.commit([], [Put(A, b"")])
            assert (await take(changes, 1))[0].revision == revision

    async def test_lease_ttls_restart_when_the_file_is_opened(self, path: Path) -> None:
        async with open_store(path) as store:
            short, long = await store.grant(1.0), await store.grant(3600.0)
            await store.commit([], [Put(A, b"", short), Put(B, b"", long)])
        async with open_store(path) as store:
            listing = await store.list(EVERYTHING)
            assert {entry.key for entry in listing.entries} == {A, B}
            async with aclosing(store.watch(EVERYTHING, listing.revision)) as changes:
                assert (await take(changes, 1))[0].events == (Event(A, None),)
            await store.keep_alive(long)
            await store.revoke(long)
            assert await store.read(B) is None

    async def test_the_file_is_opened_by_one_process_only(self, path: Path) -> None:
        async with open_store(path) as store:
            with pytest.raises(Unavailable, match=str(path)):
                async with open_store(path):
                    pass
            await store.commit([], [Put(A, b"")])
        async with open_store(path) as store:
            assert await store.read(A) is not None

    def test_the_file_is_readable_by_its_owner_only(self, path: Path) -> None:
        asyncio.run(self.write_three(path))
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}

    async def test_a_closed_store_reports_it(self, path: Path) -> None:
        store = open_store(path)
        with pytest.raises(Unavailable):
            await store.read(A)
        async with store:
            watch = store.watch(EVERYTHING, 1)
            waiting = asyncio.create_task(anext(watch))
            await asyncio.sleep(0)  # let the watch start
        with pytest.raises(Unavailable):
            await soon(waiting)
        with pytest.raises(Unavailable):
            await store.commit([], [Put(A, b"")])

    async def test_a_file_that_cannot_be_created_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "absent" / "store.db"
        with pytest.raises(Unavailable, match=str(path)):
            async with open_store(path):
                pass

    async def test_a_full_disk_fails_the_commit_and_nothing_else(self, path: Path) -> None:
        async with open_store(path) as store:
            kept = await store.commit([], [Put(A, b"1")])
            hard, soft = resource.RLIM_INFINITY, 200_000
            old = resource.getrlimit(resource.RLIMIT_FSIZE)
            previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            try:
                with pytest.raises(Unavailable, match=str(path)):
                    await store.commit([], [Put(B, bytes(1_000_000))])
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, old)
                signal.signal(signal.SIGXFSZ, previous)
            assert await store.read(B) is None
            assert await store.commit([RevisionEquals(A, kept)], [Put(B, b"2")]) == kept + 1

    async def test_a_lease_that_could_not_be_revoked_expires_later(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("weft.adapters.stores.sqlite._DISK_TIMEOUT_S", 0.5)
        end = Transaction.end

        def refuse(transaction: Transaction, lease: LeaseId) -> Revision:
            monkeypatch.setattr(Transaction, "end", end)
            raise Unavailable("the disk is full")

        async with open_store(path) as store:
            lease = await store.grant(3600)
            since = await store.commit([], [Put(A, b"", lease)])
            monkeypatch.setattr(Transaction, "end", refuse)
            with pytest.raises(Unavailable):
                await store.revoke(lease)
            async with aclosing(store.watch(EVERYTHING, since)) as changes:
                assert (await take(changes, 1))[0].events == (Event(A, None),)
