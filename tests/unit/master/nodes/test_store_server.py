"""Authentication of nodes by the store server, and its handling of bad requests."""

from __future__ import annotations

import io
import os
import socket
import ssl
import stat
import struct
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from weft.adapters.stores.memory import open_store
from weft.adapters.stores.remote import open_store as open_remote
from weft.domain.errors import Denied, Invalid, Unavailable
from weft.domain.ids import StoreKey
from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import free_port
from weft.lab.waiting import soon
from weft.master.nodes.store_server import MAX_BODY, authenticate_node, check_peer, serving_store
from weft.ports.store import PrefixUnchangedSince, Put, RevisionEquals, Store
from weft.runtime import http_failover
from weft.runtime.http import serving
from weft.runtime.server_tls import server_tls
from weft.runtime.store import wire
from weft.runtime.store.mirror import EVERYTHING

STATUS = StoreKey("status/nodes/node-1/x")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_failover, "RETRY_TIMEOUT_S", 1.0)


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store() as opened:
        yield opened


@pytest.fixture
async def unix(store: Store, tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "store.sock"
    async with serving_store(store, unix=path):
        yield path


async def post(unix: Path, call: str, body: bytes, *, node: str | None = "node-1") -> tuple[int, wire.Fault | None]:
    headers = {} if node is None else {wire.NODE_HEADER: node}
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(unix)), headers=headers) as session,
        session.post(f"http://weft{wire.PREFIX}/{call}", data=io.BytesIO(body)) as answer,
    ):
        data = await answer.read()
        return answer.status, None if answer.status == 200 else msgspec.msgpack.decode(data, type=wire.Fault)


class TestSocket:
    def test_only_our_user_may_open_it(self, unix: Path) -> None:
        status = unix.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_uid == os.geteuid()

    async def test_a_client_must_name_its_node(self, unix: Path) -> None:
        for name in (None, "", "no name", "a/b", "../x", "x" * 300):
            status, fault = await post(unix, "list", wire.encode(wire.KeyRequest(EVERYTHING)), node=name)
            assert status == 403
            assert fault is not None
            assert fault.code == "denied"

    async def test_it_replaces_the_socket_of_a_dead_server(self, store: Store, tmp_path: Path) -> None:
        path = tmp_path / "store.sock"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        async with serving_store(store, unix=path), open_remote([f"unix:{path}"], node="node-1") as remote:
            await remote.commit([], [Put(STATUS, b"")])
        assert not path.exists()

    async def test_a_socket_that_cannot_be_created_is_reported(self, store: Store) -> None:
        with pytest.raises(Unavailable):
            async with serving_store(store, unix=Path("/dev/null/store.sock")):
                pass

    async def test_an_error_of_the_block_passes_unchanged(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(TimeoutError):
            async with serving_store(store, unix=tmp_path / "store.sock"):
                raise TimeoutError("something else took too long")


class TestTls:
    @pytest.fixture
    def authority(self, tmp_path: Path) -> Authority:
        return Authority(tmp_path / "ours")

    @pytest.fixture
    async def endpoint(self, store: Store, authority: Authority) -> AsyncIterator[str]:
        server, port = authority.issue("server", subject="/CN=master"), free_port()
        tls = server_tls(server.cert, server.key, client_ca=authority.ca)
        async with serving_store(store, addresses=(("127.0.0.1", port),), tls=tls):
            yield f"https://127.0.0.1:{port}"

    async def test_the_certificate_overrides_the_header(self, endpoint: str, authority: Authority) -> None:
        files = authority.issue("node", subject="/OU=weft:nodes/CN=node-1")
        async with open_remote(
            [endpoint], node="node-2", ca=str(files.ca), cert=str(files.cert), key=str(files.key)
        ) as remote:
            await remote.commit([], [Put(STATUS, b"")])
            with pytest.raises(Denied):
                await remote.commit([], [Put(StoreKey("status/nodes/node-2/x"), b"")])

    async def test_a_certificate_without_a_name_is_denied(self, endpoint: str, authority: Authority) -> None:
        files = authority.issue("node", subject="/O=weft")
        async with open_remote(
            [endpoint], node="node-1", ca=str(files.ca), cert=str(files.cert), key=str(files.key)
        ) as remote:
            with pytest.raises(Denied):
                await remote.list(EVERYTHING)
            with pytest.raises(Denied):
                await soon(anext(remote.watch(EVERYTHING, 1)))

    async def test_a_certificate_of_another_ca_is_rejected(
        self, endpoint: str, authority: Authority, tmp_path: Path
    ) -> None:
        foreign = Authority(tmp_path / "foreign").issue("node", subject="/CN=node-1")
        async with open_remote(
            [endpoint], node="node-1", ca=str(authority.ca), cert=str(foreign.cert), key=str(foreign.key)
        ) as remote:
            with pytest.raises(Unavailable):
                await remote.list(EVERYTHING)

    async def test_a_server_of_another_ca_is_not_trusted(
        self, endpoint: str, authority: Authority, tmp_path: Path
    ) -> None:
        files, foreign = authority.issue("node", subject="/CN=node-1"), Authority(tmp_path / "foreign")
        async with open_remote(
            [endpoint], node="node-1", ca=str(foreign.ca), cert=str(files.cert), key=str(files.key)
        ) as remote:
            with pytest.raises(Unavailable):
                await remote.list(EVERYTHING)

    async def test_without_client_certificates_nothing_is_served(self, store: Store, authority: Authority) -> None:
        server = authority.issue("server", subject="/CN=master")
        lax: list[ssl.SSLContext | None] = [None, server_tls(server.cert, server.key)]
        for tls in lax:
            with pytest.raises(Invalid):
                async with serving_store(store, addresses=(("127.0.0.1", free_port()),), tls=tls):
                    pass


class TestBadRequests:
    @pytest.mark.parametrize("call", ["read", "list", "commit", "watch", "grant", "keep-alive", "revoke"])
    @pytest.mark.parametrize("body", [b"", b"\xc1", b"hello", wire.encode({"nonsense": 1}), wire.encode([1, 2])])
    async def test_an_undecodable_request_is_malformed(self, unix: Path, call: str, body: bytes) -> None:
        status, fault = await post(unix, call, body)
        assert status == 400
        assert fault is not None
        assert fault.code == "malformed"

    @pytest.mark.parametrize("key", ["x" * 2000, "a\nb", "\x00", "ä", "a\x7f"])
    async def test_bad_keys_are_invalid(self, unix: Path, key: str) -> None:
        requests = {
            "read": wire.KeyRequest(StoreKey(key)),
            "list": wire.KeyRequest(StoreKey(key)),
            "watch": wire.WatchRequest(StoreKey(key), 1),
            "commit": wire.CommitRequest((), (Put(StoreKey(f"status/nodes/node-1/{key}"), b""),)),
        }
        for call, request in requests.items():
            status, fault = await post(unix, call, wire.encode(request))
            assert (call, status) == (call, 422)
            assert fault is not None
            assert fault.field == "key"

    @pytest.mark.parametrize("revision", [-1, 2**63, 2**64 - 1])
    async def test_bad_revisions_are_invalid(self, unix: Path, revision: int) -> None:
        for call, request in (
            ("watch", wire.WatchRequest(STATUS, revision)),
            ("commit", wire.CommitRequest((RevisionEquals(STATUS, revision),), ())),
            ("commit", wire.CommitRequest((PrefixUnchangedSince(STATUS, revision),), ())),
        ):
            status, _ = await post(unix, call, wire.encode(request))
            assert status == 422

    @pytest.mark.parametrize("ttl", [0.0, -1.0, 1e9, float("inf"), float("nan")])
    async def test_bad_ttls_are_invalid(self, unix: Path, ttl: float) -> None:
        status, _ = await post(unix, "grant", wire.encode(wire.GrantRequest(ttl)))
        assert status == 422

    async def test_a_huge_body_is_rejected(self, unix: Path) -> None:
        request = wire.CommitRequest((), (Put(STATUS, bytes(MAX_BODY)),))
        status, _ = await post(unix, "commit", wire.encode(request))
        assert status == 413

    async def test_an_unknown_call_is_rejected(self, unix: Path) -> None:
        status, _ = await post(unix, "drop-everything", b"")
        assert status == 404


class Peer(socket.socket):
    """A connection whose peer has a uid of our choice."""

    def __init__(self, family: socket.AddressFamily, uid: int) -> None:
        super().__init__(family)
        self._uid = uid

    def getsockopt(self, level: int, name: int, size: int = 0) -> bytes:  # type: ignore[override]
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 4711, self._uid, 0)


@pytest.mark.parametrize("uid", [0, os.geteuid()])
def test_root_and_our_own_user_are_accepted_on_the_unix_socket(uid: int) -> None:
    with Peer(socket.AF_UNIX, uid) as peer:
        check_peer(peer)


def test_another_user_is_denied_on_the_unix_socket() -> None:
    with Peer(socket.AF_UNIX, os.geteuid() + 1) as peer, pytest.raises(Denied):
        check_peer(peer)


def test_plain_tcp_is_denied() -> None:
    with Peer(socket.AF_INET, 0) as peer, pytest.raises(Denied):
        check_peer(peer)
    with pytest.raises(Denied):
        check_peer(None)


def test_a_real_unix_connection_of_our_own_user_is_accepted() -> None:
    one, other = socket.socketpair()
    with one, other:
        check_peer(one)


async def authenticated_name(directory: Path, *, subject: str, uris: Sequence[str] = ()) -> str:
    """The node name that a server derives from a client certificate with these names."""

    async def name(request: web.Request) -> web.Response:
        try:
            return web.Response(text=authenticate_node(request))
        except Denied as error:
            return web.Response(text=error.message, status=403)

    authority = Authority(directory)
    server = authority.issue("server", subject="/CN=server")
    caller = authority.issue("caller", subject=subject, names=[f"URI:{uri}" for uri in uris])
    address = ("127.0.0.1", free_port())
    app = web.Application()
    app.router.add_get("/", name)
    tls = ssl.create_default_context(cafile=authority.ca)
    tls.load_cert_chain(caller.cert, caller.key)
    async with (
        serving(app, (address,), tls=server_tls(server.cert, server.key, client_ca=authority.ca)),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session,
        session.get(f"https://127.0.0.1:{address[1]}/") as answer,
    ):
        return await answer.text()


@pytest.mark.parametrize(
    ("subject", "uris", "node"),
    [
        ("/OU=weft:nodes/CN=one", [], "one"),
        ("/OU=weft:nodes/CN=one", ["spiffe://somewhere/two"], "one"),
        ("/CN=one", ["weft:name:two"], "two"),
        ("/", ["weft:name:" + "n" * 256], "n" * 256),
    ],
)
async def test_the_client_certificate_names_the_node(tmp_path: Path, subject: str, uris: list[str], node: str) -> None:
    """By our URI SAN, else by the common name beside our organizational unit."""
    assert await authenticated_name(tmp_path, subject=subject, uris=uris) == node


@pytest.mark.parametrize("uris", [[], ["weft:name:one", "weft:name:two"], ["weft:name:"]])
async def test_a_certificate_with_no_node_name_or_several_is_denied(tmp_path: Path, uris: list[str]) -> None:
    assert "names no node" in await authenticated_name(tmp_path, subject="/O=weft", uris=uris)


@pytest.mark.parametrize("subject", ["/CN=node-1", "/OU=people/CN=node-1", "/O=weft:nodes/CN=node-1"])
async def test_a_certificate_of_the_organization_is_not_a_node(tmp_path: Path, subject: str) -> None:
    """A CA of a whole organization signs users and web servers too; their common name must not be taken for a node."""
    assert "names no node" in await authenticated_name(tmp_path, subject=subject)
