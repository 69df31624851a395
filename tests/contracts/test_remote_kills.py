"""The server of the remote store and its clients are killed: no event is lost or doubled, no commit is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.proxy import Proxy
from tests.support.store_chaos import under_chaos
from tests.support.store_load import Commit, stress_process
from tests.support.store_process import HISTORY, serving_process

from weft.adapters.stores.remote import open_store
from weft.drivers import RemoteStoreSettings, SqliteStoreSettings
from weft.drivers import open_store as open_any
from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import free_port
from weft.master.nodes.store_server import serving_store
from weft.runtime.server_tls import server_tls

NODE = "node-1"
CHAOS = f"status/nodes/{NODE}/chaos/"
pytestmark = pytest.mark.timeout(300)  # starts many processes, on a machine that may be busy
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("kills", [35, pytest.param(400, marks=SOAK)])
async def test_the_server_is_killed(tmp_path: Path, kills: int) -> None:
    file, socket, log = tmp_path / "store.db", tmp_path / "store.sock", tmp_path / "log"
    with ExitStack() as ending:
        server = ending.enter_context(serving_process(file, socket, log=log))
        assert await server.next_line() == "serving"
        async with open_store([f"unix:{socket}"], node=NODE) as store, under_chaos(store, prefix=CHAOS) as chaos:
            for _ in range(kills):
                await asyncio.sleep(random.uniform(0, 0.05))  # a random moment of the operation is the purpose
                server.kill()
                server = ending.enter_context(serving_process(file, socket, log=log))
                assert await server.next_line() == "serving"
                await chaos.wait_for_progress()


@pytest.mark.parametrize("kills", [15, pytest.param(100, marks=SOAK)])
async def test_a_client_is_killed(tmp_path: Path, kills: int) -> None:
    socket = tmp_path / "store.sock"
    settings = RemoteStoreSettings(endpoints=(f"unix:{socket}",), node=NODE)
    async with (
        open_any(SqliteStoreSettings(path=str(tmp_path / "store.db"), history=HISTORY)) as server_port,
        serving_store(server_port, unix=socket),
        open_any(settings) as store,
        under_chaos(store, prefix=CHAOS, writers="a") as chaos,
    ):
        for _ in range(kills):
            with stress_process(settings, (f"{CHAOS}x", f"{CHAOS}y"), log=tmp_path / "log") as child:
                lines = [await child.next_line() for _ in range(3)]
                await asyncio.sleep(random.uniform(0, 0.05))  # a random moment of the operation is the purpose
                child.kill()
                lines += child.read_rest()
            chaos.acknowledged += [Commit.parse(line) for line in lines[2:]]


class TestConnections:
    """Over TLS, through a proxy."""

    @pytest.fixture
    async def server_port(self, tmp_path: Path) -> AsyncIterator[int]:
        """The port of a server."""
        authority, port = Authority(tmp_path), free_port()
        server = authority.issue("server", subject="/CN=master")
        authority.issue("node", subject=f"/OU=weft:nodes/CN={NODE}")
        async with (
            open_any(SqliteStoreSettings(path=str(tmp_path / "store.db"), history=HISTORY)) as store,
            serving_store(
                store,
                addresses=(("127.0.0.1", port),),
                tls=server_tls(server.cert, server.key, client_ca=authority.ca),
            ),
        ):
            yield port

    def settings(self, files: Path, *ports: int) -> RemoteStoreSettings:
        return RemoteStoreSettings(
            endpoints=tuple(f"https://127.0.0.1:{port}" for port in ports),
            node=NODE,
            ca=str(files / "ca.pem"),
            cert=str(files / "node.pem"),
            key=str(files / "node.key"),
        )

    async def test_connections_are_cut(self, server_port: int, tmp_path: Path) -> None:
        async with (
            Proxy(server_port) as proxy,
            open_any(self.settings(tmp_path, proxy.port)) as store,
            under_chaos(store, prefix=CHAOS) as chaos,
        ):
            for _ in range(20):
                await asyncio.sleep(random.uniform(0, 0.05))  # a random moment of the operation is the purpose
                await proxy.cut()
                await chaos.wait_for_progress()

    async def test_a_stalled_connection_is_noticed(self, server_port: int, tmp_path: Path) -> None:
        async with (
            Proxy(server_port) as proxy,
            open_any(self.settings(tmp_path, proxy.port, server_port)) as store,
            under_chaos(store, prefix=CHAOS) as chaos,
        ):
            proxy.stall()
            await chaos.wait_for_progress()
