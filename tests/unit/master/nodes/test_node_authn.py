"""Root and our own user are believed on the unix socket, a certificate over TLS; plain TCP never is."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import ClientSession, TCPConnector, web

from weft.domain.errors import Denied
from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import free_port
from weft.master.nodes.node_authn import check_peer, node_of
from weft.runtime.http import server_tls, serving


class Peer(socket.socket):
    """A connection whose other end is held by a user of our choice."""

    def __init__(self, family: socket.AddressFamily, uid: int) -> None:
        super().__init__(family)
        self._uid = uid

    def getsockopt(self, level: int, name: int, size: int = 0) -> bytes:  # type: ignore[override]
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 4711, self._uid, 0)


@pytest.mark.parametrize("uid", [0, os.geteuid()])
def test_root_and_our_own_user_are_let_in(uid: int) -> None:
    with Peer(socket.AF_UNIX, uid) as peer:
        check_peer(peer)


def test_another_user_is_not() -> None:
    with Peer(socket.AF_UNIX, os.geteuid() + 1) as peer, pytest.raises(Denied):
        check_peer(peer)


def test_plain_tcp_is_not() -> None:
    with Peer(socket.AF_INET, 0) as peer, pytest.raises(Denied):
        check_peer(peer)
    with pytest.raises(Denied):
        check_peer(None)


def test_a_real_connection_of_ours_is_let_in() -> None:
    one, other = socket.socketpair()
    with one, other:
        check_peer(one)


async def told(directory: Path, *, subject: str, uris: Sequence[str] = ()) -> str:
    """The node that a server takes a caller for, who shows a certificate of these names."""

    async def name(request: web.Request) -> web.Response:
        try:
            return web.Response(text=node_of(request))
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
        ClientSession(connector=TCPConnector(ssl=tls)) as session,
        session.get(f"https://127.0.0.1:{address[1]}/") as answer,
    ):
        return await answer.text()


@pytest.mark.parametrize(
    ("subject", "uris", "node"),
    [
        ("/CN=one", [], "one"),
        ("/CN=one", ["spiffe://somewhere/two"], "one"),
        ("/CN=one", ["weft:name:two"], "two"),
        ("/", ["weft:name:" + "n" * 256], "n" * 256),
    ],
)
async def test_a_certificate_says_which_node_it_is(tmp_path: Path, subject: str, uris: list[str], node: str) -> None:
    """By our URI, and by the common name where there is none."""
    assert await told(tmp_path, subject=subject, uris=uris) == node


@pytest.mark.parametrize("uris", [[], ["weft:name:one", "weft:name:two"], ["weft:name:"]])
async def test_a_certificate_that_names_nobody_or_several_is_refused(tmp_path: Path, uris: list[str]) -> None:
    assert "names no node" in await told(tmp_path, subject="/O=weft", uris=uris)
