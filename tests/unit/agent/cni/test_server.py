"""The door for runtimes: who hangs up, who has little time, and what is told in which code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.agent.cni.server import cni_server, time_to_work
from weft.cni.request import Request
from weft.cni.wire import HEADER_SIZE, Answer, Call, body_size, decode_answer, encode_call
from weft.domain.errors import Exhausted, Unavailable, WeftError
from weft.lab.waiting import DEADLINE, soon, until

CONFIG = b'{"cniVersion":"1.0.0","name":"weft","type":"weft-cni"}'
ADD = {"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "a", "CNI_IFNAME": "eth0", "CNI_NETNS": "/run/netns/a"}


class Cases:
    """Use cases that answer, fail or wait, as they are told."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.waits = False
        self.asked = 0
        self.cancelled = 0
        self.observed: list[tuple[str, str]] = []

    async def serve(self, request: Request) -> bytes:
        self.asked += 1
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


class Caller:
    """A shim's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, environment: dict[str, str], *, deadline: float = DEADLINE) -> None:
        self._writer.write(encode_call(Call(environment=environment, stdin=CONFIG, deadline=deadline)))

    async def answer(self) -> Answer:
        size = body_size(await soon(self._reader.readexactly(HEADER_SIZE)))
        return decode_answer(await soon(self._reader.readexactly(size)))

    async def refusal(self) -> dict[str, Any]:
        answer = await self.answer()
        assert answer.exit_code == 1
        members: dict[str, Any] = json.loads(answer.stdout)
        return members

    def hang_up(self) -> None:
        self._writer.close()


@asynccontextmanager
async def calling(path: Path, cases: Cases) -> AsyncIterator[Caller]:
    async with cni_server(path / "cni.sock", cases.serve, cases.observe):
        caller = Caller(*await asyncio.open_unix_connection(path / "cni.sock"))
        try:
            yield caller
        finally:
            caller.hang_up()


async def test_an_answer_is_one_frame(tmp_path: Path) -> None:
    cases = Cases()
    async with calling(tmp_path, cases) as caller:
        caller.send(ADD)
        assert await caller.answer() == Answer(exit_code=0, stdout=b"{}")
        assert cases.observed == [("ADD", "done")]


@pytest.mark.parametrize(
    ("failure", "code"), [(Exhausted("none is left"), 101), (Unavailable("later"), 11), (ValueError("a fault"), 100)]
)
async def test_failures_have_their_codes(tmp_path: Path, failure: WeftError | ValueError, code: int) -> None:
    """What we did not expect is told in the log alone."""
    cases = Cases()
    cases.failure = failure
    async with calling(tmp_path, cases) as caller:
        caller.send(ADD)
        told = await caller.refusal()
        assert (told["code"], told["cniVersion"]) == (code, "1.0.0")
        assert "a fault" not in told["msg"]


async def test_a_caller_that_hangs_up_ends_its_work(tmp_path: Path) -> None:
    """A runtime that is killed in the middle of ADD: what it began is not carried on behind its back."""
    cases = Cases()
    cases.waits = True
    async with calling(tmp_path, cases) as caller:
        caller.send(ADD)
        await until(lambda: cases.asked == 1)
        caller.hang_up()
        await until(lambda: cases.observed == [("ADD", "gone")])
        assert cases.cancelled == 1


async def test_our_reason_comes_before_the_caller_gives_up(tmp_path: Path) -> None:
    """C-050: the agent's answer is there while the shim still listens."""
    cases = Cases()
    cases.waits = True
    async with calling(tmp_path, cases) as caller:
        caller.send(ADD, deadline=0.5)
        told = await caller.refusal()
        assert (told["code"], told["msg"]) == (11, "the agent did not finish in time: try again")
        assert cases.cancelled == 1


@pytest.mark.parametrize(("deadline", "time"), [(60.0, 59.0), (4.0, 3.0), (1.0, 0.75), (0.0, 0.0)])
def test_some_of_the_callers_time_is_kept_for_the_way_back(deadline: float, time: float) -> None:
    assert time_to_work(deadline) == time


@pytest.mark.parametrize("override", ["", "0", "false"])
async def test_the_machines_own_namespace_is_code_8(tmp_path: Path, override: str) -> None:
    """C-015, before anything is done."""
    cases = Cases()
    async with calling(tmp_path, cases) as caller:
        caller.send(ADD | {"CNI_NETNS": "/proc/self/ns/net", "CNI_NETNS_OVERRIDE": override})
        assert (await caller.refusal())["code"] == 8
        assert cases.asked == 0


@pytest.mark.parametrize("override", ["1", "true", "TRUE"])
async def test_who_means_the_machine_itself_may_say_so(tmp_path: Path, override: str) -> None:
    """C-015."""
    cases = Cases()
    async with calling(tmp_path, cases) as caller:
        caller.send(ADD | {"CNI_NETNS": "/proc/self/ns/net", "CNI_NETNS_OVERRIDE": override})
        assert (await caller.answer()).exit_code == 0
