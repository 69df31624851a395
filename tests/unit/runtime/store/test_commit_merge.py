"""Commits are merged only where that makes no visible difference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.stores.memory import open_store
from weft.domain.errors import Stale
from weft.domain.ids import StoreKey
from weft.domain.store_types import NEVER, Compare, Delete, DeleteAll, PrefixUnchangedSince, Put, RevisionEquals, Write
from weft.ports.store import Store
from weft.runtime.store.commit_merge import Commit, mergeable, merged
from weft.runtime.store.mirror import EVERYTHING

LIMITS = {"operations": 128, "size": 1_000}


def key(text: str) -> StoreKey:
    return StoreKey(text)


def create(name: str, *compares: Compare) -> Commit:
    return Commit([RevisionEquals(key(name), NEVER), *compares], [Put(key(name), b"")])


def test_independent_commits_are_merged_and_compares_deduplicated() -> None:
    fence = RevisionEquals(key("leader"), 7)
    commits = [create("a", fence), create("b", fence), create("c", fence)]
    assert list(mergeable(commits, **LIMITS)) == [0, 1, 2]
    assert merged(commits) == Commit(
        [RevisionEquals(key("a"), NEVER), fence, RevisionEquals(key("b"), NEVER), RevisionEquals(key("c"), NEVER)],
        [Put(key("a"), b""), Put(key("b"), b""), Put(key("c"), b"")],
    )


def test_two_that_write_one_key_stay_apart() -> None:
    assert list(mergeable([create("a"), create("a"), create("b")], **LIMITS)) == [0, 2]


def test_two_of_which_one_compares_what_the_other_writes_stay_apart() -> None:
    reads_a, reads_folder = create("b", RevisionEquals(key("a"), 3)), create("c", PrefixUnchangedSince(key("a/"), 3))
    assert list(mergeable([create("a"), reads_a], **LIMITS)) == [0]
    assert list(mergeable([reads_a, create("a")], **LIMITS)) == [0]
    assert list(mergeable([create("a/1"), reads_folder], **LIMITS)) == [0]
    assert list(mergeable([reads_folder, create("a/1")], **LIMITS)) == [0]


def test_two_that_expect_different_revisions_stay_apart() -> None:
    assert list(
        mergeable([create("a", RevisionEquals(key("x"), 1)), create("b", RevisionEquals(key("x"), 2))], **LIMITS)
    ) == [0]


def test_deleting_by_prefix_stays_alone() -> None:
    sweep = Commit([], [DeleteAll(key("a/"))])
    assert list(mergeable([sweep, create("b")], **LIMITS)) == [0]
    assert list(mergeable([create("b"), sweep], **LIMITS)) == [0]


def test_the_limits_of_the_store_hold() -> None:
    commits = [create(f"{n}") for n in range(10)]
    assert list(mergeable(commits, operations=4, size=1_000)) == [0, 1, 2, 3]
    large = [Commit([], [Put(key(f"{n}"), bytes(400))]) for n in range(4)]
    assert list(mergeable(large, operations=128, size=1_000)) == [0, 1]
    huge = [Commit([], [Put(key(f"{n}"), bytes(4_000))]) for n in range(2)]
    assert list(mergeable(huge, operations=128, size=1_000)) == [0]


keys = st.sampled_from([key(text) for text in ("a/1", "a/2", "b/1", "b/2", "c")])
prefixes = st.sampled_from([key(text) for text in ("a/", "b/", "c", "d/")])
revisions = st.integers(0, 4)
compares: st.SearchStrategy[Compare] = st.builds(RevisionEquals, keys, revisions) | st.builds(
    PrefixUnchangedSince, prefixes, revisions
)
writes: st.SearchStrategy[Write] = st.builds(Put, keys, st.binary(max_size=1)) | st.builds(Delete, keys)
commits = st.builds(
    Commit,
    st.lists(compares, max_size=3),
    st.lists(writes, min_size=1, max_size=3, unique_by=lambda write: str(msg_key(write))),
)


def msg_key(write: Write) -> StoreKey:
    return write.prefix if isinstance(write, DeleteAll) else write.key


async def seeded(store: Store) -> None:
    """Some keys with revisions 2, 3 and 4."""
    for name in ("a/1", "b/1", "c"):
        await store.commit([], [Put(key(name), b"seed")])


async def state_after(groups: Sequence[Commit]) -> dict[StoreKey, bytes] | None:
    """What is in a store after the commits were carried out one after another; None when one of them was refused."""
    async with open_store() as store:
        await seeded(store)
        try:
            for commit in groups:
                await store.commit(commit.compares, commit.writes)
        except Stale:
            return None
        return {entry.key: entry.value for entry in (await store.list(EVERYTHING)).entries}


@given(st.lists(commits, min_size=1, max_size=5))
def test_merging_is_the_same_as_one_after_another(asked: list[Commit]) -> None:
    together = [asked[position] for position in mergeable(asked, **LIMITS)]
    assert together[0] is asked[0]
    assert asyncio.run(state_after([merged(together)])) == asyncio.run(state_after(together))
    assert asyncio.run(state_after(together)) == asyncio.run(state_after(together[::-1]))
