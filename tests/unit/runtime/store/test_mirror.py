"""A mirror holds what the store holds: from the listing on, over lost history, and with our own commits first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.stores.memory import open_store
from weft.domain.errors import Compacted, Unavailable
from weft.domain.ids import StoreKey
from weft.lab.waiting import DEADLINE, soon, until
from weft.ports.store import NEVER, Change, Delete, Entry, Event, Listing, Put, Revision, Store
from weft.runtime.store.mirror import EVERYTHING, Mirror, follow, listings_and_changes

A, B = StoreKey("a"), StoreKey("b")


class Copy:
    """A subscriber that records everything."""

    def __init__(self) -> None:
        self.values: dict[StoreKey, bytes] = {}
        self.replaced = 0
        self.applied: list[Change] = []

    def replace(self, listing: Listing) -> None:
        self.replaced += 1
        self.values = {entry.key: entry.value for entry in listing.entries}

    def was_replaced_after(self, times: int) -> bool:
        return self.replaced > times

    def apply(self, change: Change) -> None:
        self.applied.append(change)
        for event in change.events:
            if event.value is None:
                self.values.pop(event.key, None)
            else:
                self.values[event.key] = event.value


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store(history=20) as opened:
        yield opened


async def test_a_mirror_has_what_was_there_and_what_comes(store: Store) -> None:
    """W3: nothing between the listing and the watch is lost."""
    copy = Copy()
    await store.commit([], [Put(A, b"1")])
    async with follow(store, copy, within=DEADLINE) as mirror:
        assert mirror.in_sync
        assert copy.values == {A: b"1"}
        revision = await store.commit([], [Put(B, b"2"), Delete(A)])
        await mirror.wait_for(revision, within=DEADLINE)
        assert copy.values == {B: b"2"}
        assert mirror.revision == revision


async def test_a_mirror_of_a_part_sees_only_that(store: Store) -> None:
    copy = Copy()
    async with follow(store, copy, prefix=StoreKey("a/")) as mirror:
        await store.commit([], [Put(B, b"")])
        revision = await store.commit([], [Put(StoreKey("a/1"), b"1"), Put(A, b"")])
        await mirror.wait_for(revision, within=DEADLINE)
    assert copy.values == {StoreKey("a/1"): b"1"}


async def test_waiting_for_what_does_not_come_ends(store: Store) -> None:
    async with follow(store, Copy()) as mirror:
        with pytest.raises(Unavailable):
            await mirror.wait_for(1_000, within=0.01)
        revision = await store.commit([], [Put(A, b"")])
        await mirror.wait_for(revision, within=DEADLINE)


async def test_a_store_that_does_not_answer_is_reported_at_the_start() -> None:
    with pytest.raises(Unavailable):
        async with follow(open_store(), Copy(), within=0.05):
            pass


class Flaky:
    """A store whose listings and watches fail as scripted before they succeed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.list_failures: list[Exception] = []
        self.watch_failures: list[Exception] = []
        self.watched_from: list[Revision] = []
        self.broken = asyncio.Event()

    async def list(self, prefix: StoreKey) -> Listing:
        if self.list_failures:
            raise self.list_failures.pop()
        return await self._store.list(prefix)

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        self.watched_from.append(since)
        if self.watch_failures:
            raise self.watch_failures.pop()
        async for change in self._store.watch(prefix, since):
            yield change
            if self.watch_failures:
                raise self.watch_failures.pop()


async def test_a_store_that_is_away_is_waited_for_and_no_listing_is_repeated(store: Store) -> None:
    flaky, copy = Flaky(store), Copy()
    flaky.list_failures = [Unavailable("away"), Unavailable("away")]
    async with follow(flaky, copy) as mirror:
        flaky.watch_failures = [Unavailable("cut"), Unavailable("cut")]
        first = await store.commit([], [Put(A, b"1")])
        await mirror.wait_for(first, within=DEADLINE)
        second = await store.commit([], [Put(B, b"2")])
        await mirror.wait_for(second, within=DEADLINE)
    assert copy.values == {A: b"1", B: b"2"}
    assert copy.replaced == 1
    assert flaky.watched_from[1:] == [first, first]


async def test_lost_history_is_made_up_for_by_a_listing(store: Store) -> None:
    """Deletions that happened meanwhile are seen, too."""
    flaky, copy = Flaky(store), Copy()
    await store.commit([], [Put(A, b"1")])
    async with follow(flaky, copy) as mirror:
        flaky.watch_failures = [Compacted("gone")]
        await store.commit([], [Delete(A)])
        revision = await store.commit([], [Put(B, b"2")])
        await mirror.wait_for(revision, within=DEADLINE)
    assert copy.values == {B: b"2"}
    assert copy.replaced == 2


async def test_listings_and_changes_go_on_from_where_they_were(store: Store) -> None:
    news = listings_and_changes(store, EVERYTHING)
    listing = await soon(anext(news))
    assert isinstance(listing, Listing)
    revision = await store.commit([], [Put(A, b"1")])
    assert await soon(anext(news)) == Change(revision, (Event(A, b"1"),))
    await news.aclose()


class Script:
    """A store that says what the test wants it to say: its mirror's `run` is fed by hand."""

    def __init__(self) -> None:
        self.listing = Listing((), 1)
        self.changes: asyncio.Queue[Change | Exception] = asyncio.Queue()

    async def list(self, prefix: StoreKey) -> Listing:
        return self.listing

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        while True:
            item = await self.changes.get()
            if isinstance(item, Exception):
                raise item
            yield item


class TestOwnCommits:
    """What we committed ourselves is in the sink at once, and the watch does not take it back."""

    @pytest.fixture
    def script(self) -> Script:
        return Script()

    @pytest.fixture
    def copy(self) -> Copy:
        return Copy()

    @pytest.fixture
    async def mirror(self, script: Script, copy: Copy) -> AsyncIterator[Mirror]:
        async with follow(script, copy) as following:
            yield following

    async def deliver(self, script: Script, mirror: Mirror, revision: Revision, *events: Event) -> None:
        script.changes.put_nowait(Change(revision, events))
        await mirror.wait_for(revision, within=DEADLINE)

    async def test_it_is_there_at_once_and_the_watch_does_not_repeat_it(
        self, script: Script, mirror: Mirror, copy: Copy
    ) -> None:
        mirror.note_own(5, [Event(A, b"own")])
        assert copy.values == {A: b"own"}
        assert mirror.revision == 1
        await self.deliver(script, mirror, 5, Event(A, b"own"))
        assert copy.applied == [Change(5, (Event(A, b"own"),))]

    async def test_older_news_does_not_take_it_back(self, script: Script, mirror: Mirror, copy: Copy) -> None:
        mirror.note_own(5, [Event(A, b"own")])
        await self.deliver(script, mirror, 3, Event(A, b"older"), Event(B, b"other"))
        assert copy.values == {A: b"own", B: b"other"}
        await self.deliver(script, mirror, 4, Event(A, None))
        assert copy.values == {A: b"own", B: b"other"}

    async def test_older_news_does_not_bring_back_what_was_deleted(
        self, script: Script, mirror: Mirror, copy: Copy
    ) -> None:
        mirror.note_own(5, [Event(A, None)])
        await self.deliver(script, mirror, 4, Event(A, b"older"))
        assert copy.values == {}
        await self.deliver(script, mirror, 5, Event(A, None))
        await self.deliver(script, mirror, 6, Event(A, b"newer"))
        assert copy.values == {A: b"newer"}

    async def test_newer_news_wins(self, script: Script, mirror: Mirror, copy: Copy) -> None:
        mirror.note_own(5, [Event(A, b"own"), Event(B, b"own")])
        await self.deliver(script, mirror, 6, Event(A, b"newer"))
        assert copy.values == {A: b"newer", B: b"own"}

    async def test_what_the_watch_has_passed_is_not_noted_again(
        self, script: Script, mirror: Mirror, copy: Copy
    ) -> None:
        await self.deliver(script, mirror, 5, Event(A, b"own"))
        await self.deliver(script, mirror, 6, Event(A, b"newer"))
        mirror.note_own(5, [Event(A, b"own")])
        assert copy.values == {A: b"newer"}

    async def test_own_commits_may_be_noted_in_any_order(self, mirror: Mirror, copy: Copy) -> None:
        mirror.note_own(7, [Event(A, b"second")])
        mirror.note_own(5, [Event(A, b"first"), Event(B, b"first")])
        assert copy.values == {A: b"second", B: b"first"}

    async def test_a_listing_older_than_our_commit_does_not_take_it_back(
        self, script: Script, mirror: Mirror, copy: Copy
    ) -> None:
        await self.deliver(script, mirror, 2, Event(B, b"2"))
        mirror.note_own(9, [Event(A, b"own"), Event(B, None)])
        script.listing = Listing((Entry(A, b"older", 7), Entry(B, b"2", 2)), 8)
        script.changes.put_nowait(Compacted("gone"))
        await until(lambda: copy.replaced == 2)
        assert copy.values == {A: b"own"}
        await self.deliver(script, mirror, 10, Event(A, b"newer"))
        assert copy.values == {A: b"newer"}

    async def test_a_listing_newer_than_our_commit_wins(self, script: Script, mirror: Mirror, copy: Copy) -> None:
        mirror.note_own(5, [Event(A, b"own")])
        script.listing = Listing((Entry(B, b"2", 6),), 6)
        script.changes.put_nowait(Compacted("gone"))
        await until(lambda: copy.replaced == 2)
        assert copy.values == {B: b"2"}

    async def test_before_the_first_listing_nothing_is_noted(self, script: Script, copy: Copy) -> None:
        mirror = Mirror(script, copy)
        mirror.note_own(5, [Event(A, b"own")])
        assert copy.values == {}
        assert not mirror.in_sync
        assert mirror.revision == NEVER


steps = st.lists(
    st.tuples(st.sampled_from("abc"), st.none() | st.binary(max_size=1), st.booleans(), st.integers(0, 3)), max_size=30
)


@given(steps, st.integers(0, 29))
def test_whatever_the_order_the_newest_state_of_each_key_is_shown(
    commits: list[tuple[str, bytes | None, bool, int]], relist_after: int
) -> None:
    """Commits of our own and of others; the watch lags behind by a random number of revisions, and is broken once."""
    asyncio.run(_lagging(commits, relist_after))


async def _lagging(commits: list[tuple[str, bytes | None, bool, int]], relist_after: int) -> None:
    script, copy = Script(), Copy()
    revision, truth, seen = 1, dict[StoreKey, tuple[Revision, bytes | None]](), dict[StoreKey, Revision]()
    pending: list[Change] = []
    async with follow(script, copy) as mirror:
        for position, (name, value, own, delivered) in enumerate(commits):
            key, revision = StoreKey(name), revision + 1
            truth[key] = revision, value
            pending.append(Change(revision, (Event(key, value),)))
            if own:
                mirror.note_own(revision, [Event(key, value)])
                seen[key] = revision
            if position == relist_after:
                script.listing = Listing(
                    tuple(Entry(each, data, at) for each, (at, data) in sorted(truth.items()) if data is not None),
                    revision,
                )
                pending.clear()
                before = copy.replaced
                script.changes.put_nowait(Compacted("gone"))
                await until(partial(copy.was_replaced_after, before))
            for change in pending[:delivered]:
                script.changes.put_nowait(change)
                await mirror.wait_for(change.revision, within=DEADLINE)
            del pending[:delivered]
            for known, at in seen.items():
                if truth[known][0] == at:
                    assert copy.values.get(known) == truth[known][1]
        for change in pending:
            script.changes.put_nowait(change)
        if commits:
            await mirror.wait_for(revision, within=DEADLINE)
        assert copy.values == {key: value for key, (_, value) in truth.items() if value is not None}
