"""Contract tests for stores (`weft.ports.store`).

A test class for one store subclasses `StoreContract` and provides the fixture `store`. All keys start with `root`, so
that a store with write access to only a part of the keys can be tested too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar

import pytest

from weft.domain.errors import Compacted, Invalid, NotFound, Stale
from weft.domain.ids import StoreKey
from weft.domain.store_types import LARGEST_VALUE
from weft.lab.waiting import DEADLINE, soon, until
from weft.ports.store import (
    NEVER,
    Change,
    Delete,
    DeleteAll,
    Event,
    LeaseId,
    PrefixUnchangedSince,
    Put,
    Revision,
    RevisionEquals,
    Store,
    Write,
)

# Seconds; etcd rounds up to whole ones.
SHORT_LEASE = 1.0
LONG_LEASE = 60.0
# Valid, but never granted.
NO_SUCH_LEASE = LeaseId(4_711)


async def take(changes: AsyncGenerator[Change, None], count: int) -> list[Change]:
    """The next `count` changes."""
    return [await soon(anext(changes)) for _ in range(count)]


class StoreContract:
    """The contract of `weft.ports.store`, one behaviour per test."""

    root: ClassVar[str] = "contract/"
    # Bytes of the largest value; a node may write less through netmaster.
    largest: ClassVar[int] = LARGEST_VALUE

    def key(self, text: str) -> StoreKey:
        return StoreKey(self.root + text)

    async def put(self, store: Store, text: str, value: bytes = b"x") -> Revision:
        return await store.commit([], [Put(self.key(text), value)])

    async def values(self, store: Store, prefix: str = "") -> dict[str, bytes]:
        listing = await store.list(self.key(prefix))
        return {entry.key.removeprefix(self.root): entry.value for entry in listing.entries}

    async def wait_deleted(self, store: Store, text: str, since: Revision) -> Change:
        """The change that deletes the key."""
        async with aclosing(store.watch(self.key(text), since)) as changes:
            async with asyncio.timeout(DEADLINE):
                async for change in changes:
                    if Event(self.key(text), None) in change.events:
                        return change
        raise AssertionError("a watch never ends")

    # Reading and writing

    async def test_r3_write_read_list_delete(self, store: Store) -> None:
        """R3: write, read, read all, delete."""
        assert await store.read(self.key("a")) is None
        first = await self.put(store, "a", b"1")
        second = await self.put(store, "b", b"2")
        entry = await store.read(self.key("a"))
        assert entry is not None
        assert (entry.key, entry.value, entry.revision) == (self.key("a"), b"1", first)
        assert await self.values(store) == {"a": b"1", "b": b"2"}
        assert (await store.list(self.key(""))).revision >= second
        await store.commit([], [Delete(self.key("a"))])
        assert await store.read(self.key("a")) is None
        assert await self.values(store) == {"b": b"2"}

    async def test_r3_watch_sees_create_modify_delete(self, store: Store) -> None:
        """R3: a watch gives the creation, the modification and the deletion of a key."""
        since = (await store.list(self.key(""))).revision
        async with aclosing(store.watch(self.key(""), since)) as changes:
            revisions = [await self.put(store, "a", b"1"), await self.put(store, "a", b"2")]
            revisions.append(await store.commit([], [Delete(self.key("a"))]))
            seen = await take(changes, 3)
        assert [change.events for change in seen] == [
            (Event(self.key("a"), b"1"),),
            (Event(self.key("a"), b"2"),),
            (Event(self.key("a"), None),),
        ]
        assert [change.revision for change in seen] == revisions

    async def test_revisions_grow_and_are_positive(self, store: Store) -> None:
        empty = (await store.list(self.key(""))).revision
        revisions = [empty] + [await self.put(store, "a") for _ in range(5)]
        assert empty > NEVER
        assert revisions == sorted(set(revisions))

    async def test_all_writes_of_a_commit_share_its_revision(self, store: Store) -> None:
        revision = await store.commit([], [Put(self.key("a"), b"1"), Put(self.key("b"), b"2")])
        listing = await store.list(self.key(""))
        assert [entry.revision for entry in listing.entries] == [revision, revision]

    async def test_a_listing_is_in_key_order(self, store: Store) -> None:
        names = ["b", "a/10", "a/9", "a", "a-b", "a.b", "a0", "B", "a/1/x"]
        for name in names:
            await self.put(store, name)
        listing = await store.list(self.key(""))
        assert [entry.key for entry in listing.entries] == sorted(self.key(name) for name in names)

    async def test_a_prefix_matches_whole_characters_only(self, store: Store) -> None:
        # "0" is the character after "/": an off-by-one at the end of a range would include it.
        for name in ("a/1", "a", "ab/1", "a0"):
            await self.put(store, name)
        assert set(await self.values(store, "a/")) == {"a/1"}
        assert set(await self.values(store, "a")) == {"a/1", "a", "ab/1", "a0"}
        assert await self.values(store, "c/") == {}

    async def test_deleting_an_absent_key_succeeds_without_an_event(self, store: Store) -> None:
        since = await self.put(store, "a")
        await store.commit([], [Delete(self.key("absent"))])
        await store.commit([], [DeleteAll(self.key("absent/"))])
        marker = await self.put(store, "b")
        async with aclosing(store.watch(self.key(""), since)) as changes:
            assert await take(changes, 1) == [Change(marker, (Event(self.key("b"), b"x"),))]

    async def test_values_may_be_empty_or_any_bytes(self, store: Store) -> None:
        # Neither base64 nor SQL may alter them.
        every_byte = bytes(range(256))
        await store.commit([], [Put(self.key("empty"), b""), Put(self.key("bytes"), every_byte)])
        assert await self.values(store) == {"empty": b"", "bytes": every_byte}

    async def test_the_largest_value(self, store: Store) -> None:
        # Near etcd's request limit.
        value = bytes(self.largest)
        since = (await store.list(self.key(""))).revision
        await self.put(store, "large", value)
        assert await self.values(store) == {"large": value}
        async with aclosing(store.watch(self.key(""), since)) as changes:
            assert (await take(changes, 1))[0].events == (Event(self.key("large"), value),)

    async def test_a_commit_of_100_writes(self, store: Store) -> None:
        since = (await store.list(self.key(""))).revision
        revision = await store.commit([], [Put(self.key(f"{n:03}"), b"%d" % n) for n in range(100)])
        assert len(await self.values(store)) == 100
        async with aclosing(store.watch(self.key(""), since)) as changes:
            (change,) = await take(changes, 1)
        assert change.revision == revision
        assert sorted(event.key for event in change.events) == [self.key(f"{n:03}") for n in range(100)]

    async def test_a_listing_of_2000_keys(self, store: Store) -> None:
        # More than one page of etcd.
        for start in range(0, 2_000, 100):
            await store.commit([], [Put(self.key(f"{n:05}"), b"v" * 400) for n in range(start, start + 100)])
        listing = await store.list(self.key(""))
        assert [entry.key for entry in listing.entries] == [self.key(f"{n:05}") for n in range(2_000)]

    async def test_a_key_written_twice_in_a_commit_is_refused(self, store: Store) -> None:
        a = self.key("a")
        refused: list[list[Write]] = [
            [Put(a, b"1"), Put(a, b"2")],
            [Put(a, b"1"), Delete(a)],
            [DeleteAll(self.key("")), Put(a, b"1")],
        ]
        for writes in refused:
            with pytest.raises(Invalid):
                await store.commit([], writes)
        assert await store.read(a) is None

    # Compares

    async def test_revision_equals_holds_only_for_the_last_put(self, store: Store) -> None:
        first = await self.put(store, "a", b"1")
        second = await store.commit([RevisionEquals(self.key("a"), first)], [Put(self.key("a"), b"2")])
        for revision in (first, NEVER, second + 1):
            with pytest.raises(Stale):
                await store.commit([RevisionEquals(self.key("a"), revision)], [Put(self.key("a"), b"3")])
        assert await self.values(store) == {"a": b"2"}

    async def test_revision_never_holds_while_the_key_is_absent(self, store: Store) -> None:
        create = [RevisionEquals(self.key("a"), NEVER)], [Put(self.key("a"), b"1")]
        await store.commit(*create)
        with pytest.raises(Stale):
            await store.commit(*create)
        await store.commit([], [Delete(self.key("a"))])
        await store.commit(*create)

    async def test_a_key_that_was_deleted_and_put_again_is_not_the_same(self, store: Store) -> None:
        old = await self.put(store, "a", b"1")
        await store.commit([], [Delete(self.key("a"))])
        with pytest.raises(Stale):
            await store.commit([RevisionEquals(self.key("a"), old)], [Put(self.key("b"), b"")])
        await self.put(store, "a", b"1")
        with pytest.raises(Stale):
            await store.commit([RevisionEquals(self.key("a"), old)], [Put(self.key("b"), b"")])

    async def test_a_failed_commit_writes_nothing(self, store: Store) -> None:
        here = await self.put(store, "here", b"1")
        writes: list[Write] = [Put(self.key("new"), b""), Delete(self.key("here")), DeleteAll(self.key("he"))]
        with pytest.raises(Stale):
            await store.commit(
                [RevisionEquals(self.key("here"), here), RevisionEquals(self.key("absent"), here)], writes[:2]
            )
        with pytest.raises(Stale):
            await store.commit([RevisionEquals(self.key("absent"), here)], writes[2:])
        marker = await self.put(store, "marker")
        assert await self.values(store) == {"here": b"1", "marker": b"x"}
        async with aclosing(store.watch(self.key(""), here)) as changes:
            assert (await take(changes, 1))[0].revision == marker

    async def test_a_commit_without_writes_only_checks(self, store: Store) -> None:
        revision = await self.put(store, "a")
        assert await store.commit([RevisionEquals(self.key("a"), revision)], []) >= revision
        with pytest.raises(Stale):
            await store.commit([RevisionEquals(self.key("a"), NEVER)], [])

    async def test_compares_read_the_state_before_the_commit(self, store: Store) -> None:
        await store.commit(
            [RevisionEquals(self.key("a"), NEVER), PrefixUnchangedSince(self.key(""), NEVER)],
            [Put(self.key("a"), b"1")],
        )
        assert await self.values(store) == {"a": b"1"}

    async def test_prefix_unchanged_fails_after_puts_only(self, store: Store) -> None:
        since = await self.put(store, "a/1")
        unchanged, write = PrefixUnchangedSince(self.key("a/"), since), [Put(self.key("other"), b"")]
        await store.commit([unchanged], write)
        await store.commit([], [Delete(self.key("a/1"))])
        await store.commit([unchanged], write)
        put = await self.put(store, "a/2")
        with pytest.raises(Stale):
            await store.commit([unchanged], write)
        await store.commit([PrefixUnchangedSince(self.key("a/"), put)], write)
        await self.put(store, "a/2")
        with pytest.raises(Stale):
            await store.commit([PrefixUnchangedSince(self.key("a/"), put)], write)

    async def test_prefix_unchanged_ignores_keys_outside_of_the_prefix(self, store: Store) -> None:
        await store.commit([PrefixUnchangedSince(self.key("a/"), NEVER)], [Put(self.key("first"), b"")])
        for neighbour in ("ab/1", "a", "a0", "a."):
            await self.put(store, neighbour)
        await store.commit([PrefixUnchangedSince(self.key("a/"), NEVER)], [Put(self.key("second"), b"")])
        await self.put(store, "a/1")
        with pytest.raises(Stale):
            await store.commit([PrefixUnchangedSince(self.key("a/"), NEVER)], [Put(self.key("third"), b"")])

    async def test_of_concurrent_commits_to_one_key_exactly_one_wins(self, store: Store) -> None:
        async def create(n: int) -> bool:
            try:
                await store.commit([RevisionEquals(self.key("a"), NEVER)], [Put(self.key("a"), b"%d" % n)])
            except Stale:
                return False
            return True

        won = await asyncio.gather(*(create(n) for n in range(20)))
        assert won.count(True) == 1
        assert await self.values(store) == {"a": b"%d" % won.index(True)}

    async def test_concurrent_commits_that_read_what_the_other_writes_do_not_both_win(self, store: Store) -> None:
        async def cross(mine: str, other: str) -> bool:
            try:
                await store.commit([RevisionEquals(self.key(other), NEVER)], [Put(self.key(mine), b"")])
            except Stale:
                return False
            return True

        # Often, because the race needs both commits in one merged transaction.
        for n in range(20):
            # Another commit must be in flight, or these would not be merged.
            pairs = [cross(f"{n}/a", f"{n}/b"), cross(f"{n}/b", f"{n}/a")]
            *_, first, second = await asyncio.gather(self.put(store, "x"), self.put(store, "y"), *pairs)
            assert (first, second) in {(True, False), (False, True)}

    async def test_concurrent_prefix_compare_and_put_do_not_both_win(self, store: Store) -> None:
        async def guarded(prefix: str, write: str) -> bool:
            try:
                await store.commit([PrefixUnchangedSince(self.key(prefix), NEVER)], [Put(self.key(write), b"")])
            except Stale:
                return False
            return True

        for n in range(20):
            pairs = [guarded(f"{n}/a/", f"{n}/b/1"), guarded(f"{n}/b/", f"{n}/a/1")]
            *_, first, second = await asyncio.gather(self.put(store, "x"), self.put(store, "y"), *pairs)
            assert (first, second) in {(True, False), (False, True)}

    async def test_a_stale_commit_does_not_affect_concurrent_ones(self, store: Store) -> None:
        async def create(n: int) -> object:
            # Every fifth of them is stale; a merged transaction with one must be split.
            stale = [RevisionEquals(self.key("absent"), 1)] if n % 5 == 0 else []
            return await store.commit(
                [RevisionEquals(self.key(f"{n:02}"), NEVER), *stale], [Put(self.key(f"{n:02}"), b"")]
            )

        outcomes = await asyncio.gather(*(create(n) for n in range(40)), return_exceptions=True)
        assert [isinstance(outcome, Stale) for outcome in outcomes] == [n % 5 == 0 for n in range(40)]
        assert set(await self.values(store)) == {f"{n:02}" for n in range(40) if n % 5}

    async def test_counting_by_compare_loses_no_increment(self, store: Store) -> None:
        async def increment() -> None:
            while True:
                entry = await store.read(self.key("count"))
                value, revision = (int(entry.value), entry.revision) if entry else (0, NEVER)
                try:
                    await store.commit(
                        [RevisionEquals(self.key("count"), revision)], [Put(self.key("count"), b"%d" % (value + 1))]
                    )
                except Stale:
                    continue
                return

        await asyncio.gather(*(increment() for _ in range(20)))
        assert await self.values(store) == {"count": b"20"}

    # Watching

    async def test_delete_all_is_one_change_with_an_event_for_each_key(self, store: Store) -> None:
        for name in ("a/1", "a/2", "ab/1", "a"):
            since = await self.put(store, name)
        revision = await store.commit([], [DeleteAll(self.key("a/")), Put(self.key("b"), b"")])
        assert set(await self.values(store)) == {"ab/1", "a", "b"}
        async with aclosing(store.watch(self.key(""), since)) as changes:
            (change,) = await take(changes, 1)
        assert change.revision == revision
        assert {event.key: event.value for event in change.events} == {
            self.key("a/1"): None,
            self.key("a/2"): None,
            self.key("b"): b"",
        }

    async def test_a_watch_delivers_only_keys_under_its_prefix(self, store: Store) -> None:
        since = (await store.list(self.key(""))).revision
        async with aclosing(store.watch(self.key("a/"), since)) as changes:
            await self.put(store, "ab/1")
            both = await store.commit([], [Put(self.key("a/1"), b"1"), Put(self.key("b/1"), b"2")])
            assert await take(changes, 1) == [Change(both, (Event(self.key("a/1"), b"1"),))]

    async def test_a_watch_from_an_old_revision_replays_history(self, store: Store) -> None:
        since = (await store.list(self.key(""))).revision
        revisions = [await self.put(store, f"{n}") for n in range(10)]
        async with aclosing(store.watch(self.key(""), since)) as changes:
            assert [change.revision for change in await take(changes, 10)] == revisions
        async with aclosing(store.watch(self.key(""), revisions[4])) as changes:
            assert [change.revision for change in await take(changes, 5)] == revisions[5:]

    async def test_list_then_watch_has_no_gap_and_no_duplicate(self, store: Store) -> None:
        """W3: commits between the listing and the watch are not lost."""
        total = 60

        async def write(writer: int) -> None:
            for n in range(total // 3):
                await self.put(store, f"{writer}/{n:03}")

        async def follow() -> list[StoreKey]:
            listing = await store.list(self.key(""))
            seen = [entry.key for entry in listing.entries]
            async with aclosing(store.watch(self.key(""), listing.revision)) as changes:
                last = listing.revision
                while len(seen) < total:
                    (change,) = await take(changes, 1)
                    assert change.revision > last
                    last = change.revision
                    seen += [event.key for event in change.events]
            return seen

        writers = [asyncio.create_task(write(writer)) for writer in range(3)]
        followers = [asyncio.create_task(follow()) for _ in range(3)]
        await asyncio.gather(*writers)
        wanted = sorted(self.key(f"{writer}/{n:03}") for writer in range(3) for n in range(total // 3))
        for follower in followers:
            assert sorted(await soon(follower)) == wanted

    async def test_a_watch_that_is_cancelled_leaves_nothing_behind(self, store: Store) -> None:
        async def watch(since: Revision) -> None:
            async for _ in store.watch(self.key(""), since):
                pass

        since = await self.put(store, "a")
        # A watch may run tasks of its own, which must end with it.
        before = asyncio.all_tasks()
        watchers = [asyncio.create_task(watch(since)) for _ in range(20)]
        await self.put(store, "a")
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await until(lambda: not asyncio.all_tasks() - before)
        await self.put(store, "a")

    async def test_a_slow_watcher_does_not_block_others(self, store: Store) -> None:
        since = (await store.list(self.key(""))).revision
        async with aclosing(store.watch(self.key(""), since)) as changes:
            first = await self.put(store, "0")
            assert (await take(changes, 1))[0].revision == first
            revisions = [await self.put(store, f"{n}") for n in range(1, 50)]
            assert [change.revision for change in await take(changes, 49)] == revisions

    # Leases

    async def test_an_expired_lease_deletes_its_keys(self, store: Store) -> None:
        lease = await store.grant(SHORT_LEASE)
        since = await store.commit([], [Put(self.key("a"), b"", lease), Put(self.key("b"), b"", lease)])
        change = await self.wait_deleted(store, "a", since)
        assert {event.key for event in change.events} == {self.key("a")}
        await self.wait_deleted(store, "b", since)
        assert await self.values(store) == {}
        with pytest.raises(NotFound):
            await store.keep_alive(lease)

    async def test_a_renewed_lease_does_not_expire(self, store: Store) -> None:
        short, kept = await store.grant(SHORT_LEASE), await store.grant(SHORT_LEASE)
        since = await store.commit([], [Put(self.key("short"), b"", short), Put(self.key("kept"), b"", kept)])
        ended = asyncio.create_task(self.wait_deleted(store, "short", since))
        while not ended.done():
            await store.keep_alive(kept)
            await asyncio.wait([ended], timeout=0.05)
        await ended
        assert set(await self.values(store)) == {"kept"}

    async def test_revoking_a_lease_deletes_its_keys_at_once(self, store: Store) -> None:
        lease = await store.grant(LONG_LEASE)
        since = await store.commit([], [Put(self.key("a"), b"", lease), Put(self.key("b"), b"")])
        await store.revoke(lease)
        assert set(await self.values(store)) == {"b"}
        await self.wait_deleted(store, "a", since)
        await store.revoke(lease)
        with pytest.raises(NotFound):
            await store.keep_alive(lease)

    async def test_a_key_that_is_put_again_takes_the_lease_of_its_last_put(self, store: Store) -> None:
        first, second = await store.grant(LONG_LEASE), await store.grant(LONG_LEASE)
        await store.commit([], [Put(self.key("free"), b"", first), Put(self.key("moved"), b"", first)])
        await store.commit([], [Put(self.key("free"), b""), Put(self.key("moved"), b"", second)])
        await store.revoke(first)
        assert set(await self.values(store)) == {"free", "moved"}
        await store.revoke(second)
        assert set(await self.values(store)) == {"free"}

    async def test_a_put_with_an_expired_lease_is_refused(self, store: Store) -> None:
        lease = await store.grant(LONG_LEASE)
        await store.revoke(lease)
        for ended in (lease, NO_SUCH_LEASE):
            with pytest.raises(NotFound):
                await store.commit([], [Put(self.key("b"), b""), Put(self.key("a"), b"", ended)])
        assert await self.values(store) == {}

    async def test_renewing_an_unknown_lease_is_not_found(self, store: Store) -> None:
        with pytest.raises(NotFound):
            await store.keep_alive(NO_SUCH_LEASE)


class CompactionContract:
    """The contract of a store with compacted history. The fixture `short_store` keeps fewer than 100 revisions."""

    root: ClassVar[str] = "contract/"

    def key(self, text: str) -> StoreKey:
        return StoreKey(self.root + text)

    async def compact_history(self, store: Store) -> None:
        """Make the store compact its history: write more revisions than it keeps."""
        # Twice the history that `short_store` may keep.
        for n in range(200):
            await store.commit([], [Put(self.key("filler"), b"%d" % n)])

    async def test_a_watch_of_compacted_history_fails(self, short_store: Store) -> None:
        start = await short_store.commit([], [Put(self.key("a"), b"")])
        await short_store.commit([], [Put(self.key("b"), b"")])
        await self.compact_history(short_store)
        async with aclosing(short_store.watch(self.key(""), start - 1)) as changes:
            with pytest.raises(Compacted):
                await take(changes, 1)

    async def test_the_present_state_can_be_listed_and_watched(self, short_store: Store) -> None:
        await self.compact_history(short_store)
        listing = await short_store.list(self.key(""))
        revision = await short_store.commit([], [Put(self.key("new"), b"")])
        async with aclosing(short_store.watch(self.key(""), listing.revision)) as changes:
            assert (await take(changes, 1))[0].revision == revision
