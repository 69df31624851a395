"""Requests find a server that answers, and nothing that may have happened is asked for twice."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web

from weft.domain.errors import Denied, Invalid, Unavailable
from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import free_port
from weft.lab.waiting import soon
from weft.runtime import http_failover
from weft.runtime.http_failover import Servers, TryNextServer, is_exposed
from weft.runtime.server_tls import server_tls

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Farm:
    """Small servers, each with its behaviour, and what each was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.running = AsyncExitStack()

    async def add(self, name: str, behaviour: Behaviour, *, tls: ssl.SSLContext | None = None) -> str:
        """Start a server; its URL."""

        async def handle(request: web.Request) -> web.StreamResponse:
            self.asked.append(name)
            return await behaviour(request)

        app = web.Application()
        app.router.add_post("/{path}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        self.running.push_async_callback(runner.cleanup)
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        return f"http{'s' if tls else ''}://127.0.0.1:{port}"


@pytest.fixture
async def farm() -> AsyncIterator[Farm]:
    farm = Farm()
    async with farm.running:
        yield farm


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 2.0)
    monkeypatch.setattr(http_failover, "_RESPONSE_TIMEOUT_S", 0.3)


async def echo(request: web.Request) -> web.Response:
    return web.Response(body=await request.read())


async def refuse(request: web.Request) -> web.Response:
    return web.Response(status=503, body=b"elsewhere")


async def hang_up(request: web.Request) -> web.Response:
    await request.read()
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def stall(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


def parse(status: int, body: bytes) -> bytes:
    if status == 503:
        raise TryNextServer(body.decode())
    if status == 403:
        raise Denied("no")
    return body


def unreachable() -> str:
    return f"http://127.0.0.1:{free_port()}"


async def ask(servers: Servers, *, repeatable: bool = True) -> bytes:
    return await soon(servers.ask("/x", b"hello", parse=parse, repeatable=repeatable))


@pytest.mark.parametrize("repeatable", [True, False])
async def test_what_was_never_sent_is_sent_to_the_next(farm: Farm, repeatable: bool) -> None:
    async with Servers([unreachable(), await farm.add("good", echo)]) as servers:
        assert await ask(servers, repeatable=repeatable) == b"hello"
    assert farm.asked == ["good"]


@pytest.mark.parametrize("repeatable", [True, False])
async def test_what_a_server_did_not_do_is_asked_of_the_next(farm: Farm, repeatable: bool) -> None:
    async with Servers([await farm.add("refuses", refuse), await farm.add("good", echo)]) as servers:
        assert await ask(servers, repeatable=repeatable) == b"hello"
        assert await ask(servers) == b"hello"
    assert farm.asked == ["refuses", "good", "good"], "a server that failed is left"


@pytest.mark.parametrize("bad", [hang_up, stall])
async def test_what_may_have_happened_is_asked_again_only_where_that_is_harmless(farm: Farm, bad: Behaviour) -> None:
    async with Servers([await farm.add("bad", bad), await farm.add("good", echo)]) as servers:
        assert await ask(servers) == b"hello"
    assert farm.asked == ["bad", "good"]


@pytest.mark.parametrize("bad", [hang_up, stall])
async def test_what_may_have_happened_and_must_not_happen_twice_is_reported(farm: Farm, bad: Behaviour) -> None:
    async with Servers([await farm.add("bad", bad), await farm.add("good", echo)]) as servers:
        with pytest.raises(Unavailable, match="may have"):
            await ask(servers, repeatable=False)
        assert farm.asked == ["bad"]
        assert await ask(servers, repeatable=False) == b"hello"
    assert farm.asked == ["bad", "good"]


async def test_a_refusal_for_good_is_raised_at_once(farm: Farm) -> None:
    async def deny(request: web.Request) -> web.Response:
        return web.Response(status=403)

    async with Servers([await farm.add("denies", deny), await farm.add("good", echo)]) as servers:
        with pytest.raises(Denied):
            await ask(servers)
    assert farm.asked == ["denies"]


async def test_a_server_that_comes_back_in_time_is_found(farm: Farm) -> None:
    answers = iter([refuse] * 5 + [echo] * 5)

    async def wakes_up(request: web.Request) -> web.Response:
        return await next(answers)(request)

    async with Servers([await farm.add("only", wakes_up)]) as servers:
        assert await ask(servers, repeatable=False) == b"hello"


async def test_a_call_fails_in_bounded_time_if_no_server_responds(farm: Farm) -> None:
    async with Servers([unreachable(), unreachable()]) as servers:
        with pytest.raises(Unavailable):
            await ask(servers, repeatable=False)


async def test_a_stream_gives_what_comes_and_reports_its_end(farm: Farm) -> None:
    async def two_pieces(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"one")
        await stream.write(b"two")
        return stream

    endpoint = await farm.add("good", two_pieces)
    async with Servers([endpoint]) as servers, servers.stream("/x", b"", idle_timeout=30) as stream:
        assert stream.status == 200
        assert b"".join([piece async for piece in stream.pieces]) == b"onetwo"


async def read_on(servers: Servers) -> bytes:
    """What a stream gives before it breaks."""
    received = b""
    with pytest.raises(Unavailable):
        async with servers.stream("/x", b"", idle_timeout=0.2) as stream:
            async for piece in stream.pieces:
                received += piece
    return received


async def test_a_stream_that_falls_silent_is_opened_again_at_the_same_server(farm: Farm) -> None:
    async def falls_silent(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(b"one")
        await asyncio.Event().wait()
        return stream

    async with Servers([await farm.add("quiet", falls_silent), await farm.add("other", echo)]) as servers:
        assert await soon(read_on(servers)) == b"one"
        assert await soon(read_on(servers)) == b"one"
    assert farm.asked == ["quiet", "quiet"]


@pytest.mark.parametrize("bad", [hang_up, stall])
async def test_a_stream_that_does_not_begin_is_opened_elsewhere(farm: Farm, bad: Behaviour) -> None:
    async with Servers([await farm.add("bad", bad), await farm.add("good", echo)]) as servers:
        assert await soon(read_on(servers)) == b""
        async with servers.stream("/x", b"hello", idle_timeout=30) as stream:
            assert b"".join([piece async for piece in stream.pieces]) == b"hello"
    assert farm.asked == ["bad", "good"]


async def test_the_reader_of_a_stream_may_turn_elsewhere(farm: Farm) -> None:
    async with Servers([await farm.add("leaderless", echo), await farm.add("good", echo)]) as servers:
        with pytest.raises(Unavailable):
            async with servers.stream("/x", b"", idle_timeout=30):
                raise TryNextServer("no leader")
        assert await ask(servers) == b"hello"
    assert farm.asked == ["leaderless", "good"]


async def test_servers_that_are_not_open_are_unavailable() -> None:
    with pytest.raises(Unavailable):
        await ask(Servers([unreachable()]))


def test_no_endpoint_is_refused() -> None:
    with pytest.raises(Invalid):
        Servers([])


async def test_who_names_no_authority_trusts_those_of_the_system(
    farm: Farm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where aiohttp was imported without them (`weft.runtime.memory_trim`)."""
    issued = Authority(tmp_path).issue("server", subject="/CN=server")
    url = await farm.add("one", echo, tls=server_tls(issued.cert, issued.key))
    with pytest.raises(Unavailable):
        async with Servers([url]) as servers:
            await soon(servers.ask("/x", b"?", parse=lambda _, body: body, repeatable=True))
    monkeypatch.setenv("SSL_CERT_FILE", str(issued.ca))
    async with Servers([url]) as servers:
        assert await soon(servers.ask("/x", b"?", parse=lambda _, body: body, repeatable=True)) == b"?"
    assert farm.asked == ["one"]


@pytest.mark.parametrize(
    ("url", "exposed"),
    [
        ("http://192.0.2.1:2379", True),
        ("HTTP://etcd.example:2379", True),
        ("http://[2001:db8::1]:2379", True),
        ("http://127.0.0.1.example:80", True),
        ("http://127.0.0.1@192.0.2.1:80", True),
        ("http://127.0.0.1:2379", False),
        ("http://[::1]:2379", False),
        ("http://localhost:2379", False),
        ("https://192.0.2.1:2379", False),
        ("unix:/run/store.sock", False),
    ],
)
def test_credentials_in_clear_text_are_for_this_machine_only(url: str, exposed: bool) -> None:
    assert is_exposed(url) == exposed
