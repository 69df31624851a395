"""The CNI server: disconnected clients, deadlines and error codes; requests in flight."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_datapath import request_of

from weft.agent.cni import server
from weft.agent.cni.server import MAX_SILENT_CLIENTS, InflightRequests, cni_server, inflight_requests, time_to_work
from weft.cni.request import Request
from weft.cni.wire import HEADER_SIZE, Answer, Call, body_size, decode_answer, encode_call
from weft.domain.errors import Exhausted, Unavailable, WeftError
from weft.lab.waiting import DEADLINE, soon, until

CONFIG = b'{"cniVersion":"1.0.0","name":"weft","type":"weft-cni"}'
ADD = {"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "a", "CNI_IFNAME": "eth0", "CNI_NETNS": "/run/netns/a"}


class Handler:
    """Serves requests: answers, fails or waits, as the test says."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.waits = False
        self.served = 0
        self.cancelled = 0
        self.observed: list[tuple[str, str]] = []

    async def serve(self, request: Request) -> bytes:
        self.served += 1
        if self.failure is not None:
            raise self.failure
        try:
            if self.waits:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return b"{}"

    def observe(self, verb: str, outcome: str, seconds: float) -> None:
        self.observed.append((verb, outcome))


class Client:
    """A shim's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, environment: dict[str, str], *, deadline: float = DEADLINE) -> None:
        self._writer.write(encode_call(Call(environment=environment, stdin=CONFIG, deadline=deadline)))

    async def answer(self) -> Answer:
        size = body_size(await soon(self._reader.readexactly(HEADER_SIZE)))
        return decode_answer(await soon(self._reader.readexactly(size)))

    async def failure(self) -> dict[str, Any]:
        answer = await self.answer()
        assert answer.exit_code == 1
        members: dict[str, Any] = json.loads(answer.stdout)
        return members

    def disconnect(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(path: Path, handler: Handler) -> AsyncIterator[Client]:
    async with cni_server(path / "cni.sock", handler.serve, handler.observe):
        client = Client(*await asyncio.open_unix_connection(path / "cni.sock"))
        try:
            yield client
        finally:
            client.disconnect()


async def test_an_answer_is_one_frame(tmp_path: Path) -> None:
    handler = Handler()
    async with connected(tmp_path, handler) as client:
        client.send(ADD)
        assert await client.answer() == Answer(exit_code=0, stdout=b"{}")
        assert handler.observed == [("ADD", "done")]


@pytest.mark.parametrize(
    ("failure", "code"), [(Exhausted("none is left"), 101), (Unavailable("later"), 11), (ValueError("a fault"), 100)]
)
async def test_failures_have_their_codes(tmp_path: Path, failure: WeftError | ValueError, code: int) -> None:
    """An unexpected exception goes to the log alone."""
    handler = Handler()
    handler.failure = failure
    async with connected(tmp_path, handler) as client:
        client.send(ADD)
        error = await client.failure()
        assert (error["code"], error["cniVersion"]) == (code, "1.0.0")
        assert "a fault" not in error["msg"]


async def test_a_disconnect_cancels_the_request(tmp_path: Path) -> None:
    """A runtime that is killed in the middle of ADD must not find the container attached afterwards."""
    handler = Handler()
    handler.waits = True
    async with connected(tmp_path, handler) as client:
        client.send(ADD)
        await until(lambda: handler.served == 1)
        client.disconnect()
        await until(lambda: handler.observed == [("ADD", "gone")])
        assert handler.cancelled == 1


async def test_the_error_is_sent_before_the_clients_deadline(tmp_path: Path) -> None:
    """C-050: the shim still reads when the answer comes."""
    handler = Handler()
    handler.waits = True
    async with connected(tmp_path, handler) as client:
        client.send(ADD, deadline=0.5)
        error = await client.failure()
        assert (error["code"], error["msg"]) == (11, "the agent did not finish in time: try again")
        assert handler.cancelled == 1


@pytest.mark.parametrize(("deadline", "time"), [(60.0, 59.0), (4.0, 3.0), (1.0, 0.75), (0.0, 0.0)])
def test_a_part_of_the_deadline_is_kept_for_the_answer(deadline: float, time: float) -> None:
    assert time_to_work(deadline) == time


@pytest.mark.parametrize("override", ["", "0", "false"])
async def test_the_agents_own_netns_is_code_8(tmp_path: Path, override: str) -> None:
    """C-015, before anything is done."""
    handler = Handler()
    async with connected(tmp_path, handler) as client:
        client.send(ADD | {"CNI_NETNS": "/proc/self/ns/net", "CNI_NETNS_OVERRIDE": override})
        assert (await client.failure())["code"] == 8
        assert handler.served == 0


@pytest.mark.parametrize("override", ["1", "true", "TRUE"])
async def test_the_agents_own_netns_can_be_allowed(tmp_path: Path, override: str) -> None:
    """C-015."""
    handler = Handler()
    async with connected(tmp_path, handler) as client:
        client.send(ADD | {"CNI_NETNS": "/proc/self/ns/net", "CNI_NETNS_OVERRIDE": override})
        assert (await client.answer()).exit_code == 0


class SlowHandler:
    """Serves requests when it is released, and records how each ended."""

    def __init__(self) -> None:
        self.begun = 0
        self.resume = asyncio.Event()
        self.ended: list[str] = []

    async def serve(self, request: Request) -> bytes:
        self.begun += 1
        name = type(request).__name__
        try:
            await self.resume.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            self.ended.append(f"{name} undone")
            raise
        self.ended.append(f"{name} done")
        return b"answer"


async def disconnect(requests: InflightRequests, slow: SlowHandler, verb: str) -> None:
    waiting = asyncio.create_task(requests.serve(request_of(verb, "a")))
    await until(lambda: slow.begun == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(waiting)


async def test_a_connected_client_gets_the_answer() -> None:
    slow = SlowHandler()
    slow.resume.set()
    async with inflight_requests(slow.serve) as requests:
        assert await requests.serve(request_of("ADD", "a")) == b"answer"


async def test_the_add_of_a_disconnected_client_is_undone() -> None:
    slow = SlowHandler()
    async with inflight_requests(slow.serve) as requests:
        await disconnect(requests, slow, "ADD")
        await until(lambda: slow.ended == ["Add undone"])


async def test_the_del_of_a_disconnected_client_runs_to_its_end() -> None:
    slow = SlowHandler()
    async with inflight_requests(slow.serve) as requests:
        await disconnect(requests, slow, "DEL")
        slow.resume.set()
        await until(lambda: slow.ended == ["Del done"])


async def test_a_failure_after_the_disconnect_is_only_logged() -> None:
    slow = SlowHandler()

    async def fail(request: Request) -> bytes:
        await slow.serve(request)
        raise OSError("the disk is full")

    async with inflight_requests(fail) as requests:
        await disconnect(requests, slow, "DEL")
        slow.resume.set()
        await until(lambda: slow.ended == ["Del done"])


async def test_no_request_is_in_flight_at_the_end() -> None:
    slow = SlowHandler()
    async with inflight_requests(slow.serve) as requests:
        await disconnect(requests, slow, "DEL")
    assert slow.ended == ["Del undone"]


async def test_requests_in_progress_are_bounded_also_those_whose_client_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that sends DEL and disconnects, again and again, gets an error that names the limit."""
    monkeypatch.setattr(server, "MAX_REQUESTS", 3)
    slow, handler = SlowHandler(), Handler()
    async with (
        inflight_requests(slow.serve) as requests,
        cni_server(tmp_path / "cni.sock", requests.serve, handler.observe),
    ):
        for _ in range(3):
            before = slow.begun
            client = Client(*await asyncio.open_unix_connection(tmp_path / "cni.sock"))
            client.send({**ADD, "CNI_COMMAND": "DEL"})
            await until(partial(lambda before: slow.begun > before, before))
            client.disconnect()
        await until(lambda: handler.observed == [("DEL", "gone")] * 3)
        another = Client(*await asyncio.open_unix_connection(tmp_path / "cni.sock"))
        another.send(ADD)
        failure = await another.failure()
        assert failure["code"] == 11
        assert "3 requests in progress" in failure["msg"]
        assert handler.observed[-1] == ("ADD", "11")
        slow.resume.set()
        await until(lambda: slow.ended == ["Del done"] * 3)
        next_one = Client(*await asyncio.open_unix_connection(tmp_path / "cni.sock"))
        next_one.send(ADD)
        assert (await next_one.answer()).exit_code == 0
        for each in (another, next_one):
            each.disconnect()


async def test_clients_that_send_nothing_are_bounded_and_keep_nobody_out(tmp_path: Path) -> None:
    """Half a frame or none: the ones that wait longest are disconnected, and a shim is answered."""
    handler = Handler()
    async with connected(tmp_path, handler):
        silent = [await asyncio.open_unix_connection(tmp_path / "cni.sock") for _ in range(MAX_SILENT_CLIENTS + 20)]
        silent[0][1].write(b"\0\0")
        ended = [asyncio.ensure_future(reader.read()) for reader, _ in silent]
        await until(lambda: sum(each.done() for each in ended) >= 20)
        assert set(handler.observed) == {("", "silent")}
        another = Client(*await asyncio.open_unix_connection(tmp_path / "cni.sock"))
        another.send(ADD)
        assert (await another.answer()).exit_code == 0
        for each in ended:
            each.cancel()
        for _, writer in silent:
            writer.close()
        another.disconnect()
    assert handler.served == 1
