"""Limits of connections and requests (M2): what a client gets that exceeds one, and that others notice nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import free_port
from weft.lab.waiting import DEADLINE, soon, until
from weft.runtime import admission
from weft.runtime.admission import AdmissionMetrics, Guard, Limits
from weft.runtime.http import errors_as_json, serving
from weft.runtime.listener import Tls, accepting, bind_tcp
from weft.runtime.rate_limit import LOCAL, TokenBuckets, source_of
from weft.runtime.server_tls import ServerTls


class Server:
    """A server on loopback with a page that hangs, and its guard."""

    def __init__(self, limits: Limits) -> None:
        self.guard = Guard("test", limits)
        self.port = free_port()
        self.hanging = 0

    @asynccontextmanager
    async def running(self, *, tls: Tls = None) -> AsyncIterator[Server]:
        app = web.Application(middlewares=[errors_as_json, self.guard.middleware()], client_max_size=1000)
        app.router.add_get("/healthz", self._page)
        app.router.add_get("/page", self._page)
        app.router.add_get("/hang", self._hang)
        app.router.add_get("/large", self._large)
        app.router.add_post("/read", self._read)
        async with serving(app, (("127.0.0.1", self.port),), tls=tls, guard=self.guard, grace=0.1):
            yield self

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text="fine")

    async def _hang(self, _: web.Request) -> web.Response:
        self.hanging += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def _large(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(64 << 20))

    async def _read(self, request: web.Request) -> web.Response:
        return web.Response(text=str(len(await request.read())))

    async def connect(self, stack: AsyncExitStack) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await soon(asyncio.open_connection("127.0.0.1", self.port))
        stack.callback(writer.close)
        return reader, writer

    async def hang(self, stack: AsyncExitStack) -> None:
        """One more request in progress."""
        _, writer = await self.connect(stack)
        before = self.hanging
        writer.write(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: self.hanging > before)

    async def get(self, path: str, **options: Any) -> tuple[int, Any, dict[str, str]]:
        """Status, body and headers for a client with a connection of its own."""
        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        method = "POST" if "data" in options else "GET"
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, f"http://127.0.0.1:{self.port}{path}", **options) as answer,
        ):
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text()), dict(answer.headers)


async def test_M2_silent_connections_make_room_for_others() -> None:
    async with Server(Limits(per_local=10)).running() as server, AsyncExitStack() as stack:
        silent = [await server.connect(stack) for _ in range(50)]
        assert (await server.get("/page"))[0] == 200
        assert server.guard.open <= 10
        assert await soon(silent[0][0].read()) == b"", "the one that is idle for longest is closed"


async def test_M2_the_limit_in_all_holds_for_all_sources_together() -> None:
    async with Server(Limits(connections=10)).running() as server, AsyncExitStack() as stack:
        for _ in range(50):
            await server.connect(stack)
        assert (await server.get("/page"))[0] == 200
        assert server.guard.open <= 10


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(per_local=3), "per_source"), (Limits(connections=3), "connections")],
)
async def test_M2_requests_in_progress_are_not_closed_and_health_is_served(limits: Limits, reason: str) -> None:
    async with Server(limits).running() as server, AsyncExitStack() as stack:
        for _ in range(3):
            await server.hang(stack)
        status, body, headers = await server.get("/page")
        assert status == 429
        assert set(body) == {"code", "message", "field", "details"}
        assert body["code"] == "too-many-requests"
        assert "3" in body["message"]
        assert body["details"] == {"limit": reason, "retryAfter": 1}
        assert headers["Retry-After"] == "1"
        # More silent ones than there are slots in reserve.
        for _ in range(2 * admission.RESERVE):
            await server.connect(stack)
        for _ in range(3):
            assert (await server.get("/healthz"))[0] == 200
        assert server.guard.open == 3


async def test_M2_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HANDSHAKE_S", 0.1)
    async with Server(Limits()).running() as server, AsyncExitStack() as stack:
        silent, _ = await server.connect(stack)
        slow, writer = await server.connect(stack)
        writer.write(b"GET /page HTTP/1.1\r\nHost:")  # headers that never end
        assert await soon(silent.read()) == b""
        assert await soon(slow.read()) == b""
        await server.hang(stack)
        await until(lambda: bool(server.guard._by_transport))


async def test_M2_a_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "BODY_S", 0.1)
    async with Server(Limits()).running() as server, AsyncExitStack() as stack:
        reader, writer = await server.connect(stack)
        writer.write(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nfive")
        assert await soon(reader.read()) == b""
        assert server.guard.closed["slow_body"] == 1


async def test_M2_clients_that_do_not_read_their_response_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Server(Limits(per_local=1)).running() as server, AsyncExitStack() as stack:
        _, writer = await server.connect(stack)
        cast("asyncio.Transport", writer.transport).pause_reading()
        writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: bool(server.guard._by_transport))
        (connection,) = server.guard._by_transport.values()
        await until(lambda: bool(connection.requests and not connection.busy and connection.pending()))
        assert (await server.get("/page"))[0] == 429, "it may still be reading"
        monkeypatch.setattr(admission, "SEND_S", -1.0)
        assert (await server.get("/page"))[0] == 200


async def test_M2_a_connection_that_fails_in_an_unknown_way_is_not_counted_for_ever() -> None:
    def broken() -> asyncio.Protocol:
        raise RuntimeError("no protocol")

    guard, listeners = Guard("test", Limits()), bind_tcp("127.0.0.1", 0)
    async with accepting(listeners, broken, tls=None, guard=guard):
        reader, writer = await soon(asyncio.open_connection(*listeners[0].getsockname()))
        assert await soon(reader.read()) == b"", "closed"
        writer.close()
        await until(lambda: guard.open == 0)


def test_a_host_with_an_address_that_the_machine_lacks_is_bound_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` is ::1 too where IPv6 is disabled. But a server that listens nowhere must say so."""
    here, elsewhere = ((socket.AF_INET, socket.SOCK_STREAM, 6, "", (text, 0)) for text in ("127.0.0.1", "192.0.2.1"))
    no_family = (255, socket.SOCK_STREAM, 6, "", ("::1", 0))
    found: list[Any] = [no_family, elsewhere, here]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    (listener,) = bind_tcp("localhost", 0)
    listener.close()
    for found in ([no_family], [elsewhere], [no_family, elsewhere]):  # noqa: B007  read by the lambda
        with pytest.raises(OSError, match="Cannot assign requested address"):
            bind_tcp("localhost", 0)


async def test_requests_of_one_source_are_limited_by_rate() -> None:
    async with Server(Limits(rate=2.0, local_weight=1.0)).running() as server:
        answers = [await server.get("/page") for _ in range(6)]
        refused = [(body, headers) for status, body, headers in answers if status == 429]
        assert refused
        assert "2 a second" in refused[0][0]["message"]
        assert int(refused[0][1]["Retry-After"]) >= 1
        assert (await server.get("/healthz"))[0] == 200, "health has a bucket of its own"


async def test_bodies_of_one_source_are_limited_in_bytes() -> None:
    limits = Limits(body_bytes=1500, local_weight=1.0)
    async with Server(limits).running() as server, AsyncExitStack() as stack:
        _, writer = await server.connect(stack)
        writer.write(b"POST /read HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nfive")
        await until(lambda: bool(server.guard._by_transport))
        status = 0
        async with asyncio.timeout(DEADLINE):
            while status != 429:
                status, body, _ = await server.get("/read", data=b"x" * 900)
        assert body["details"]["limit"] == "body_bytes"
        assert (await server.get("/read", data=b"x" * 400))[0] == 200
        writer.write(b"x" * 996)
        async with asyncio.timeout(DEADLINE):
            while status != 200:
                status, *_ = await server.get("/read", data=b"x" * 900)


async def test_metrics_show_what_the_limits_did() -> None:
    async with Server(Limits(per_local=1)).running() as server, AsyncExitStack() as stack:
        await server.hang(stack)
        await server.get("/page")
        registry, metrics = CollectorRegistry(), AdmissionMetrics()
        metrics.add(server.guard)
        registry.register(metrics)
        text = generate_latest(registry).decode()
    assert 'weft_connections{listener="test"} 1.0' in text
    assert 'weft_connections_closed_total{listener="test",reason="per_source"} 1.0' in text
    assert 'weft_requests_rejected_total{listener="test",reason="per_source"} 1.0' in text


async def test_M2_clients_that_begin_no_handshake_make_room_too(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("server", subject="/CN=server")
    tls = ServerTls(own.cert, own.key)
    async with Server(Limits(per_local=5)).running(tls=tls) as server, AsyncExitStack() as stack:
        for _ in range(20):
            await server.connect(stack)
        assert await answer_over_tls(server, own.ca) == 200
        assert server.guard.open <= 5


async def answer_over_tls(server: Server, ca: Path, *, pair: tuple[Path, Path] | None = None) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    if pair:
        context.load_cert_chain(*pair)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE)) as session,
        session.get(f"https://127.0.0.1:{server.port}/page", ssl=context) as answer,
    ):
        return answer.status


async def test_a_renewed_certificate_is_served_without_a_restart(tmp_path: Path) -> None:
    old, new = (Authority(tmp_path / name).issue("server", subject="/CN=server") for name in ("old", "new"))
    cert, key = tmp_path / "cert", tmp_path / "key"
    cert.write_bytes(old.cert.read_bytes())
    key.write_bytes(old.key.read_bytes())
    async with Server(Limits()).running(tls=ServerTls(cert, key)) as server:
        assert await answer_over_tls(server, old.ca) == 200
        key.write_bytes(new.key.read_bytes())
        assert await answer_over_tls(server, old.ca) == 200, "one file of two: the former pair stays"
        cert.write_bytes(new.cert.read_bytes())
        assert await answer_over_tls(server, new.ca) == 200
        with pytest.raises(aiohttp.ClientConnectorError):
            await answer_over_tls(server, old.ca)


async def test_a_former_ca_of_clients_is_not_trusted_any_more(tmp_path: Path) -> None:
    """Neither for new connections nor for those that it had authenticated."""
    servers = Authority(tmp_path / "servers").issue("server", subject="/CN=server")
    old, new = (Authority(tmp_path / name).issue("node", subject="/CN=node") for name in ("old", "new"))
    ca = tmp_path / "ca"
    ca.write_bytes(old.ca.read_bytes())
    tls = ServerTls(servers.cert, servers.key, client_ca=ca)
    async with Server(Limits()).running(tls=tls) as server:
        context = ssl.create_default_context(cafile=str(servers.ca))
        context.load_cert_chain(old.cert, old.key)
        reader, writer = await soon(asyncio.open_connection("127.0.0.1", server.port, ssl=context))
        writer.write(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: server.hanging == 1)
        ca.write_bytes(new.ca.read_bytes())
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await soon(reader.readexactly(1))
        writer.close()
        assert await answer_over_tls(server, servers.ca, pair=(new.cert, new.key)) == 200
        with pytest.raises(aiohttp.ClientError):
            await answer_over_tls(server, servers.ca, pair=(old.cert, old.key))


def test_sources() -> None:
    assert [source_of(host) for host in ("127.0.0.1", "::1", "")] == [LOCAL, LOCAL, LOCAL]
    assert source_of("192.0.2.7") == "192.0.2.7"
    assert source_of("2001:db8:0:1:2::3%eth0") == "2001:db8:0:1::/64", "one machine has a whole /64"


def test_token_buckets() -> None:
    buckets = TokenBuckets(rate=2.0, burst=2.0)
    assert [buckets.take("a", now=0.0) for _ in range(3)] == [0.0, 0.0, 0.5]
    assert buckets.take("b", now=0.0) == 0.0
    assert buckets.take("a", now=0.5) == 0.0
    assert [buckets.take("w", now=0.0, weight=10.0) for _ in range(19)] == [0.0] * 19
    for number in range(10_000):
        buckets.take(str(number), now=0.0)
    assert buckets.take("a", now=0.5) == 0.0, "the number of sources is bounded"
