"""Clients whose TLS files are replaced while they run: new connections use the new files, without an outage."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import ClientSession, web

from weft.adapters.kubernetes.api import Api
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.stores import etcd, remote
from weft.cni.files import place_file
from weft.domain.errors import Invalid, Unavailable
from weft.domain.ids import StoreKey
from weft.lab.servers.certificates import Authority, Certificate
from weft.lab.servers.processes import free_port
from weft.lab.waiting import soon
from weft.master.api.leader_proxy import LeaderProxy
from weft.runtime import http_failover
from weft.runtime.client_tls import client_tls
from weft.runtime.http import errors_as_json, serving
from weft.runtime.http_failover import Servers
from weft.runtime.server_tls import server_tls

Request = Callable[[], Awaitable[object]]
Client = Callable[[str, "Side"], AbstractAsyncContextManager[Request]]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 0.3)
    monkeypatch.setattr("weft.master.api.leader_proxy.WITHIN_S", 0.3)


class Side:
    """The files of a server or client, which are replaced by those of another CA."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.ca, self.cert, self.key = (directory / name for name in ("ca", "cert", "key"))

    def replace(self, new: Certificate) -> None:
        for target, source in ((self.ca, new.ca), (self.key, new.key), (self.cert, new.cert)):
            place_file(target, source.read_bytes(), mode=0o600)

    @property
    def names(self) -> dict[str, str]:
        return {"ca": str(self.ca), "cert": str(self.cert), "key": str(self.key)}


@asynccontextmanager
async def answering(port: int, issued: Certificate) -> AsyncIterator[None]:
    """A server with mTLS by one CA, which answers as the servers of all of the clients here do."""

    async def answer(request: web.Request) -> web.Response:
        if request.path.endswith("/read"):
            return web.Response(body=msgspec.msgpack.encode(None))
        return web.json_response({"header": {"revision": "1"}})

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", answer)
    tls = server_tls(issued.cert, issued.key, client_ca=issued.ca)
    async with serving(app, (("127.0.0.1", port),), tls=tls, grace=0.1):
        yield


@asynccontextmanager
async def kubernetes(url: str, side: Side) -> AsyncIterator[Request]:
    async with Api(ClientConfig(servers=(url,), ca=side.ca, cert=side.cert, key=side.key)) as api:
        yield lambda: api.get("/x")


@asynccontextmanager
async def through_netmaster(url: str, side: Side) -> AsyncIterator[Request]:
    async with remote.open_store([url], node="n1", **side.names) as store:
        yield lambda: store.read(StoreKey("/x"))


@asynccontextmanager
async def through_etcd(url: str, side: Side) -> AsyncIterator[Request]:
    async with etcd.open_store([url], **side.names) as store:
        yield lambda: store.read(StoreKey("/x"))


CLIENTS = (kubernetes, through_netmaster, through_etcd)


@pytest.mark.parametrize("client", CLIENTS)
async def test_replaced_files_are_used_and_the_former_ca_is_not_trusted(client: Client, tmp_path: Path) -> None:
    old, new = (Authority(tmp_path / name).issue("both", subject="/CN=x") for name in ("old", "new"))
    side, port = Side(tmp_path / "files"), free_port()
    side.replace(old)
    async with client(f"https://127.0.0.1:{port}", side) as request:
        async with answering(port, old):
            await soon(request())
        async with answering(port, new):
            with pytest.raises(Unavailable):
                await soon(request())
            side.replace(new)
            await soon(request())
        async with answering(port, old):
            with pytest.raises(Unavailable):
                await soon(request())


@pytest.mark.parametrize("client", CLIENTS)
async def test_files_that_do_not_match_leave_the_former_ones(client: Client, tmp_path: Path) -> None:
    """A certificate and its key are two files, of which one is replaced first; a file may be missing for a moment."""
    old, new = (Authority(tmp_path / name).issue("both", subject="/CN=x") for name in ("old", "new"))
    side, port = Side(tmp_path / "files"), free_port()
    side.replace(old)
    async with (
        client(f"https://127.0.0.1:{port}", side) as request,
        answering(port, old),
    ):
        await soon(request())
        place_file(side.key, new.key.read_bytes(), mode=0o600)
        await soon(request())
        side.ca.unlink()
        await soon(request())
    assert not side.ca.exists()


async def test_the_proxy_to_the_leader_uses_a_replaced_ca(tmp_path: Path) -> None:
    old, new = (Authority(tmp_path / name).issue("both", subject="/CN=x") for name in ("old", "new"))
    side, leader, own = Side(tmp_path / "files"), free_port(), free_port()
    side.replace(old)
    proxy = LeaderProxy(
        lambda: f"127.0.0.1:{leader}",
        is_leader=lambda: False,
        own_address=f"127.0.0.1:{own}",
        tls_ca=side.ca,
        use_tls=True,
    )

    async def forward(request: web.Request) -> web.StreamResponse:
        answer = await proxy.forward(request)
        assert answer is not None
        return answer

    follower, at_leader = web.Application(middlewares=[errors_as_json]), web.Application()
    follower.router.add_get("/x", forward)

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="leader")

    at_leader.router.add_get("/x", answer)
    address = ("127.0.0.1", leader)
    async with serving(follower, (("127.0.0.1", own),), tls=None), ClientSession() as session:

        async def status() -> int:
            async with session.get(f"http://127.0.0.1:{own}/x") as response:
                return response.status

        async with serving(at_leader, (address,), tls=server_tls(old.cert, old.key)):
            assert await soon(status()) == 200
        async with serving(at_leader, (address,), tls=server_tls(new.cert, new.key)):
            assert await soon(status()) == 503
            side.replace(new)
            assert await soon(status()) == 200
        async with serving(at_leader, (address,), tls=server_tls(old.cert, old.key)):
            assert await soon(status()) == 503
    await proxy.close()


async def test_a_watch_continues_while_files_are_replaced(tmp_path: Path) -> None:
    """An established stream stays; requests beside it go over a new connection."""
    old, new = (Authority(tmp_path / name).issue("both", subject="/CN=x") for name in ("old", "new"))
    side, port = Side(tmp_path / "files"), free_port()
    side.replace(old)
    is_asked = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        if request.path == "/x":
            is_asked.set()
            return web.Response(text="fine")
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one")
        await soon(is_asked.wait())
        await response.write(b"two")
        return response

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", stream)
    both = tmp_path / "both"
    both.write_bytes(old.ca.read_bytes() + new.ca.read_bytes())
    async with (
        serving(app, (("127.0.0.1", port),), tls=server_tls(old.cert, old.key, client_ca=both), grace=0.1),
        Servers([f"https://127.0.0.1:{port}"], tls=client_tls(**side.names)) as servers,
        servers.stream("/watch", idle_timeout=30) as watch,
    ):
        assert await soon(anext(watch.pieces)) == b"one"
        place_file(side.ca, both.read_bytes(), mode=0o600)
        place_file(side.key, new.key.read_bytes(), mode=0o600)
        place_file(side.cert, new.cert.read_bytes(), mode=0o600)
        assert await soon(servers.ask("/x", parse=lambda _, body: body, repeatable=False)) == b"fine"
        assert b"".join([piece async for piece in watch.pieces]) == b"two"


def test_unusable_files_are_refused_at_start(tmp_path: Path) -> None:
    issued = Authority(tmp_path).issue("node", subject="/CN=node")
    assert client_tls(ca="", cert="", key="") is None
    tls = client_tls(ca=str(issued.ca), cert=str(issued.cert), key=str(issued.key))
    assert tls is not None
    assert isinstance(tls.current(), ssl.SSLContext)
    with pytest.raises(Invalid, match="absent"):
        client_tls(ca=str(tmp_path / "absent.pem"), cert="", key="")
