"""The scheduler repeats a run by its seed, lets no time pass by itself, and injects faults."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from tests.support.interleaving import FaultProfile, ScheduledStore, Scheduler, run_sync

from weft.adapters.stores.memory import MemoryStore
from weft.domain.errors import Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import NEVER, Put, RevisionEquals

NO_FAULTS = FaultProfile(refused=0, answer_lost=0, late=0, clock=0, compacted=0)
KEY = StoreKey("key")


def history_of(seed: int, profile: FaultProfile) -> list[str]:
    """Three actors count up a key together."""
    scheduler = Scheduler(Random(seed), profile)

    async def count(store: ScheduledStore) -> None:
        for _ in range(5):
            try:
                present = await store.read(KEY)
                value = str(int(present.value) + 1 if present else 1).encode()
                await store.commit([RevisionEquals(KEY, present.revision if present else NEVER)], [Put(KEY, value)])
            except Exception as error:
                scheduler.history.append(f"failed with {error}")

    async def main() -> None:
        async with MemoryStore() as store:
            scheduler.enable_faults()
            await asyncio.gather(*(count(ScheduledStore(store, scheduler, actor)) for actor in "abc"))
            await scheduler.disable_faults()

    scheduler.run(main())
    return scheduler.history


def test_a_seed_repeats_its_run_and_others_differ() -> None:
    profile = FaultProfile(refused=0.1, answer_lost=0.1, late=0.1, clock=0.1, compacted=0)
    assert history_of(1, profile) == history_of(1, profile)
    assert history_of(1, profile) != history_of(2, profile)


def test_actors_interleave() -> None:
    assert any("Stale" in line for line in history_of(3, NO_FAULTS))


def test_an_hour_passes_when_nothing_else_can_happen() -> None:
    scheduler = Scheduler(Random(1), NO_FAULTS)
    scheduler.run(asyncio.sleep(3600))
    assert scheduler.now == 3600


def test_waiting_for_nothing_is_an_error_with_the_history() -> None:
    scheduler = Scheduler(Random(1), NO_FAULTS)

    async def wait() -> None:
        await scheduler.turn("someone", "went on")
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="deadlock") as caught:
        scheduler.run(wait())
    assert "someone: went on" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("profile", "written"),
    [
        (FaultProfile(refused=1, answer_lost=0, late=0, clock=0, compacted=0), False),
        (FaultProfile(refused=0, answer_lost=1, late=0, clock=0, compacted=0), True),
    ],
)
def test_an_unanswered_commit_may_or_may_not_have_happened(profile: FaultProfile, written: bool) -> None:
    scheduler = Scheduler(Random(1), profile)

    async def main() -> None:
        async with MemoryStore() as store:
            scheduler.enable_faults()
            with pytest.raises(Unavailable):
                await ScheduledStore(store, scheduler, "a").commit([], [Put(KEY, b"1")])
            assert (await store.read(KEY) is not None) == written

    scheduler.run(main())


def test_a_late_commit_happens_after_its_caller_got_an_error() -> None:
    scheduler = Scheduler(Random(1), FaultProfile(refused=0, answer_lost=0, late=1, clock=0, compacted=0))

    async def main() -> None:
        async with MemoryStore() as store:
            scheduler.enable_faults()
            with pytest.raises(Unavailable):
                await ScheduledStore(store, scheduler, "a").commit([], [Put(KEY, b"1")])
            assert run_sync(store.read(KEY)) is None
            await scheduler.disable_faults()
            assert run_sync(store.read(KEY)) is not None

    scheduler.run(main())
