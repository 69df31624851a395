"""Workloads that wait at the same time are plugged together, and nobody overtakes another call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from weft.agent.dataplane.executor import DatapathExecutor
from weft.domain.desired.state import Port
from weft.domain.errors import DatapathFault, WeftError
from weft.domain.ids import TenantName
from weft.lab.waiting import DEADLINE
from weft.ports.datapath import Datapath, EndpointConfig, PlugRequest
from weft.runtime.worker_thread import WorkerThread


def plugging(name: str) -> PlugRequest:
    port = Port(TenantName("blue"), name, "02:00:00:00:00:01", ())
    return PlugRequest(EndpointConfig(port=port, netns="", interface="eth0", addresses=(), mtu=1450))


class Noting:
    """A datapath that notes what it is told, and refuses one workload."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self.is_broken = False

    def plug_together(self, pluggings: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        names = tuple(each.wiring.port.interface for each in pluggings)
        self.told.append(names)
        for name in names:
            if self.is_broken:
                raise ZeroDivisionError
            yield DatapathFault("refused") if name == "bad" else None

    def reap(self) -> None:
        self.told.append(("reap",))


class Bench:
    """A kernel whose thread is held up until it is let go."""

    def __init__(self, thread: WorkerThread) -> None:
        self.datapath = Noting()
        self.kernel = DatapathExecutor(cast("Datapath", self.datapath), thread)
        self.go = threading.Event()
        thread.post(self._hold_up)

    def _hold_up(self) -> None:
        self.go.wait(DEADLINE)

    async def plug(self, *names: str) -> list[BaseException | None]:
        """Ask for all of them while the thread has other things to do."""
        asked = [asyncio.ensure_future(self.kernel.plug(plugging(name))) for name in names]
        await asyncio.sleep(0)
        self.go.set()
        return await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with WorkerThread("kernel") as thread:
        yield Bench(thread)


async def test_those_who_wait_at_the_same_time_are_plugged_together(bench: Bench) -> None:
    assert await bench.plug("a", "b", "c") == [None] * 3
    assert bench.datapath.told == [("a", "b", "c")]


async def test_a_fault_is_told_to_whom_it_concerns(bench: Bench) -> None:
    one, bad, other = await bench.plug("a", "bad", "c")
    assert (one, other) == (None, None)
    assert isinstance(bad, DatapathFault)


async def test_nobody_overtakes_another_call(bench: Bench) -> None:
    """What is told with a workload follows from what was told before it."""
    first = asyncio.ensure_future(bench.kernel.plug(plugging("a")))
    await asyncio.sleep(0)
    between = asyncio.ensure_future(bench.kernel.call(lambda datapath: datapath.reap()))
    await asyncio.sleep(0)
    await bench.plug("b")
    await asyncio.gather(first, between)
    assert bench.datapath.told == [("a",), ("reap",), ("b",)]


async def test_one_who_gives_up_before_it_begins_is_left_out(bench: Bench) -> None:
    first = asyncio.ensure_future(bench.kernel.plug(plugging("a")))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await bench.plug("b") == [None]
    assert bench.datapath.told == [("b",)]


async def test_nobody_waits_for_ever_when_the_datapath_breaks(bench: Bench) -> None:
    bench.datapath.is_broken = True
    assert [type(each) for each in await bench.plug("a", "b")] == [ZeroDivisionError] * 2
