"""The scheduler repeats a run by its seed, lets no time pass by itself, and gives every call its fate."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from tests.support.interleaving import FaultProfile, ScheduledStore, Scheduler, at_once

from weft.adapters.stores.memory import MemoryStore
from weft.domain.errors import Unavailable
from weft.domain.ids import StoreKey
from weft.ports.store import NEVER, Put, RevisionEquals

CALM = FaultProfile(refused=0, unheard=0, late=0, clock=0, compacted=0)
KEY = StoreKey("key")


def life_of(seed: int, weather: FaultProfile) -> list[str]:
    """Three actors count up a key together."""
    scheduler = Scheduler(Random(seed), weather)

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
            scheduler.storm()
            await asyncio.gather(*(count(ScheduledStore(store, scheduler, actor)) for actor in "abc"))
            await scheduler.calm_down()

    scheduler.run(main())
    return scheduler.history


def test_a_seed_repeats_its_run_and_others_differ() -> None:
    weather = FaultProfile(refused=0.1, unheard=0.1, late=0.1, clock=0.1, compacted=0)
    assert life_of(1, weather) == life_of(1, weather)
    assert life_of(1, weather) != life_of(2, weather)


def test_actors_meet_in_the_middle_of_each_others_work() -> None:
    assert any("Stale" in line for line in life_of(3, CALM))


def test_an_hour_passes_when_nothing_else_can_happen() -> None:
    scheduler = Scheduler(Random(1), CALM)
    scheduler.run(asyncio.sleep(3600))
    assert scheduler.now == 3600


def test_waiting_for_nothing_is_an_error_that_tells_what_happened() -> None:
    scheduler = Scheduler(Random(1), CALM)

    async def wait() -> None:
        await scheduler.turn("someone", "went on")
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="nothing can happen") as caught:
        scheduler.run(wait())
    assert "someone: went on" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("weather", "written"),
    [
        (FaultProfile(refused=1, unheard=0, late=0, clock=0, compacted=0), False),
        (FaultProfile(refused=0, unheard=1, late=0, clock=0, compacted=0), True),
    ],
)
def test_an_unanswered_commit_may_or_may_not_have_happened(weather: FaultProfile, written: bool) -> None:
    scheduler = Scheduler(Random(1), weather)

    async def main() -> None:
        async with MemoryStore() as store:
            scheduler.storm()
            with pytest.raises(Unavailable):
                await ScheduledStore(store, scheduler, "a").commit([], [Put(KEY, b"1")])
            assert (await store.read(KEY) is not None) == written

    scheduler.run(main())


def test_a_late_commit_happens_after_its_caller_was_told_that_there_is_no_answer() -> None:
    scheduler = Scheduler(Random(1), FaultProfile(refused=0, unheard=0, late=1, clock=0, compacted=0))

    async def main() -> None:
        async with MemoryStore() as store:
            scheduler.storm()
            with pytest.raises(Unavailable):
                await ScheduledStore(store, scheduler, "a").commit([], [Put(KEY, b"1")])
            assert at_once(store.read(KEY)) is None
            await scheduler.calm_down()
            assert at_once(store.read(KEY)) is not None

    scheduler.run(main())
