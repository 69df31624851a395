"""A lease is renewed while the store answers, and given up when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain.errors import Unavailable
from weft.lab.waiting import soon, until
from weft.ports.store import LeaseId
from weft.runtime.store.lease_keepalive import renew_until_lost

TTL = 0.6


class Moody(MemoryStore):
    """Renews leases only when in the mood: it may also refuse, or not answer."""

    mood = "good"
    renewals = 0
    refusals = 0

    async def keep_alive(self, lease: LeaseId) -> None:
        if self.mood == "refuses":
            self.refusals += 1
            raise Unavailable("not now")
        if self.mood == "hangs":
            await asyncio.Event().wait()
        await super().keep_alive(lease)
        self.renewals += 1


@pytest.fixture
async def store() -> AsyncIterator[Moody]:
    async with Moody() as opened:
        yield opened


async def renewing(store: Moody, ttl: float = TTL) -> tuple[LeaseId, asyncio.Task[str]]:
    granted = asyncio.get_running_loop().time()
    lease = await store.grant(ttl)
    return lease, asyncio.create_task(renew_until_lost(store, lease, ttl=ttl, granted=granted))


async def test_a_lease_is_renewed_again_and_again(store: Moody) -> None:
    _, task = await renewing(store)
    await until(lambda: store.renewals >= 3)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])


async def test_a_lease_that_has_ended_is_reported(store: Moody) -> None:
    lease, task = await renewing(store)
    await store.revoke(lease)
    assert await soon(task) == "the lease has expired"


@pytest.mark.parametrize("mood", ["refuses", "hangs"])
async def test_a_store_that_does_not_renew_is_given_up(store: Moody, mood: str) -> None:
    _, task = await renewing(store)
    store.mood = mood
    assert "did not respond" in await soon(task)


async def test_a_store_that_comes_back_in_time_is_forgiven(store: Moody) -> None:
    _, task = await renewing(store, ttl=5.0)
    store.mood = "refuses"
    await until(lambda: store.refusals >= 1)
    store.mood = "good"
    await until(lambda: store.renewals >= 1)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
