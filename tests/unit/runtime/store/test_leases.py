"""The clock of leases: ends each once, unless it is kept alive."""

from __future__ import annotations

import asyncio

import pytest

from weft.domain.errors import NotFound
from weft.lab.waiting import until
from weft.ports.store import LeaseId
from weft.runtime.store.leases import LeaseClock

ONE, TWO = LeaseId(1), LeaseId(2)


async def test_a_lease_ends_once_and_is_then_unknown() -> None:
    ended: list[LeaseId] = []
    clock = LeaseClock(ended.append)
    clock.start(ONE, 0.01)
    assert ONE in clock
    await until(lambda: ended == [ONE])
    assert ONE not in clock
    with pytest.raises(NotFound):
        clock.keep_alive(ONE)


async def test_a_lease_that_is_kept_alive_outlives_one_that_is_not() -> None:
    ended: list[LeaseId] = []
    clock = LeaseClock(ended.append)
    clock.start(ONE, 2.0)
    clock.start(TWO, 2.0)
    while ended != [TWO]:
        assert ONE in clock
        clock.keep_alive(ONE)
        await asyncio.sleep(0.01)
    clock.close()


async def test_a_lease_that_is_forgotten_does_not_end() -> None:
    ended: list[LeaseId] = []
    clock = LeaseClock(ended.append)
    clock.start(ONE, 0.01)
    clock.start(TWO, 0.02)
    clock.forget(ONE)
    clock.forget(ONE)
    await until(lambda: ended == [TWO])
    clock.start(ONE, 0.01)
    clock.close()
    await asyncio.sleep(0.05)
    assert ended == [TWO]
