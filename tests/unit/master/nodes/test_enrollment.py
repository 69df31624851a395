"""The join port against those who have no valid token, and renewal of netmaster's own certificate on a bad disk."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import pytest

from weft.cni.files import place_file
from weft.domain.errors import Denied
from weft.lab.servers.processes import free_port
from weft.lab.waiting import DEADLINE, until
from weft.master.nodes import enrollment
from weft.master.nodes.enrollment import JOIN_LIMITS, NodeEnrollment
from weft.ports.orchestrator import NetmasterEndpoint
from weft.runtime.admission import Guard
from weft.runtime.ca import Authority, new_request
from weft.runtime.http import serving
from weft.runtime.join_wire import PATH
from weft.runtime.tasks import background


class Reviews:
    """The TokenReviews of an API server that knows one token, counted."""

    def __init__(self) -> None:
        self.count = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def read(self) -> NetmasterEndpoint | None:
        return None

    async def publish(self, endpoint: NetmasterEndpoint) -> None:
        pass

    async def review_token(self, token: str) -> str:
        self.count += 1
        await self.may_answer.wait()
        if token != "good":
            raise Denied("the token is not valid")
        return "node-1"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


async def join(session: aiohttp.ClientSession, port: int, *, token: str, body: bytes) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    async with session.post(f"http://127.0.0.1:{port}{PATH}", data=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def test_a_rejected_token_costs_one_token_review(tmp_path: Path) -> None:
    """Anybody on the network may try: garbage costs none, and a flood is answered with 429."""
    reviews, port, guard = Reviews(), free_port(), Guard("join", JOIN_LIMITS)
    authority = Authority.open(tmp_path / "authority.pem")
    app = NodeEnrollment(authority, reviews, life=timedelta(hours=1)).app(guard)
    timeout = aiohttp.ClientTimeout(total=DEADLINE)
    request = new_request("any").text
    async with (
        serving(app, (("127.0.0.1", port),), tls=None, guard=guard),
        aiohttp.ClientSession(timeout=timeout) as session,
    ):
        assert (await join(session, port, token="bad", body=b"garbage"))[0] == 400
        assert reviews.count == 0
        for _ in range(5):
            assert (await join(session, port, token="bad", body=request))[0] == 403
        assert reviews.count == 1
        assert (await join(session, port, token="good", body=request))[0] == 200
        # This machine may send ten times what another may: 100 at once.
        answers = [await join(session, port, token="bad", body=request) for _ in range(300)]
        refused = [body for status, body in answers if status == 429]
        assert refused
        assert refused[0]["details"]["limit"] == "rate"
        assert reviews.count == 2


async def test_tokens_beyond_those_that_are_reviewed_are_rejected_and_counted(tmp_path: Path) -> None:
    """An API server that hangs: each token would hold a connection to it."""
    reviews, port, guard = Reviews(), free_port(), Guard("join", JOIN_LIMITS)
    reviews.may_answer.clear()
    app = NodeEnrollment(Authority.open(tmp_path / "authority.pem"), reviews, life=timedelta(hours=1)).app(guard)
    request = new_request("any").text
    async with (
        serving(app, (("127.0.0.1", port),), tls=None, guard=guard),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session,
        asyncio.TaskGroup() as group,
    ):
        waiting = [group.create_task(join(session, port, token=f"{n}", body=request)) for n in range(16)]
        await until(lambda: reviews.count == 16)
        status, body = await join(session, port, token="good", body=request)
        assert (status, body["details"]) == (429, {"limit": "token_reviews", "retryAfter": 1})
        assert guard.rejected["token_reviews"] == 1
        reviews.may_answer.set()
        assert {(await answer)[0] for answer in waiting} == {403}
        assert (await join(session, port, token="good", body=request))[0] == 200


async def test_renewal_goes_on_after_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk ended the task, and netmaster with it."""
    authority = Authority.open(tmp_path / "authority.pem")
    own = enrollment._ServingCertificate(authority, tmp_path, addresses=("127.0.0.1",), life=timedelta(seconds=0.4))
    file = tmp_path / "netmaster.pem"
    first, attempts = file.read_bytes(), 0

    def fail_once(path: Path, content: bytes, *, mode: int) -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise OSError(28, "No space left on device")
        place_file(path, content, mode=mode)

    monkeypatch.setattr(enrollment, "place_file", fail_once)
    async with background(own.run_renewal(), name="renewal"):
        await until(lambda: file.read_bytes() != first)
    assert attempts >= 2
