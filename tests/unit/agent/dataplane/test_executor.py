"""Requests that wait at the same time are plugged in one batch, and calls keep their order."""

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


def plug_request(name: str) -> PlugRequest:
    port = Port(TenantName("blue"), name, "02:00:00:00:00:01", ())
    return PlugRequest(EndpointConfig(port=port, netns="", interface="eth0", addresses=(), mtu=1450))


class RecordingDatapath:
    """A datapath that records its calls, and fails for one endpoint."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.is_broken = False

    def plug_batch(self, requests: Sequence[PlugRequest]) -> Iterator[WeftError | None]:
        names = tuple(each.config.port.interface for each in requests)
        self.calls.append(names)
        for name in names:
            if self.is_broken:
                raise ZeroDivisionError
            yield DatapathFault("failed") if name == "bad" else None

    def reap(self) -> None:
        self.calls.append(("reap",))


class Bench:
    """An executor whose thread is blocked until `go` is set."""

    def __init__(self, thread: WorkerThread) -> None:
        self.datapath = RecordingDatapath()
        self.executor = DatapathExecutor(cast("Datapath", self.datapath), thread)
        self.go = threading.Event()
        thread.post(self._block)

    def _block(self) -> None:
        self.go.wait(DEADLINE)

    async def plug(self, *names: str) -> list[BaseException | None]:
        """Request all of them while the thread is busy."""
        pending = [asyncio.ensure_future(self.executor.plug(plug_request(name))) for name in names]
        await asyncio.sleep(0)
        self.go.set()
        return await asyncio.gather(*pending, return_exceptions=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with WorkerThread("kernel") as thread:
        yield Bench(thread)


async def test_requests_that_wait_at_the_same_time_are_one_batch(bench: Bench) -> None:
    assert await bench.plug("a", "b", "c") == [None] * 3
    assert bench.datapath.calls == [("a", "b", "c")]


async def test_a_fault_is_raised_only_for_its_own_request(bench: Bench) -> None:
    one, bad, other = await bench.plug("a", "bad", "c")
    assert (one, other) == (None, None)
    assert isinstance(bad, DatapathFault)


async def test_a_request_does_not_overtake_a_call(bench: Bench) -> None:
    """The difference of an endpoint builds on the calls before it."""
    first = asyncio.ensure_future(bench.executor.plug(plug_request("a")))
    await asyncio.sleep(0)
    between = asyncio.ensure_future(bench.executor.call(lambda datapath: datapath.reap()))
    await asyncio.sleep(0)
    await bench.plug("b")
    await asyncio.gather(first, between)
    assert bench.datapath.calls == [("a",), ("reap",), ("b",)]


async def test_a_request_cancelled_before_it_starts_is_left_out(bench: Bench) -> None:
    first = asyncio.ensure_future(bench.executor.plug(plug_request("a")))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await bench.plug("b") == [None]
    assert bench.datapath.calls == [("b",)]


async def test_every_caller_gets_the_error_when_a_batch_breaks(bench: Bench) -> None:
    bench.datapath.is_broken = True
    assert [type(each) for each in await bench.plug("a", "b")] == [ZeroDivisionError] * 2
