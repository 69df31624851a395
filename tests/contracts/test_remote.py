"""The store contract on netmaster's store, over a unix socket and over TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weft.adapters.stores.remote import open_store
from weft.domain.lifecycle.node_permissions import MAX_STATUS
from weft.drivers import SqliteStoreSettings
from weft.drivers import open_store as open_any
from weft.lab.servers.certificates import Authority
from weft.lab.servers.processes import free_port
from weft.master.nodes.store_server import serving_store
from weft.ports.store import Store
from weft.runtime.server_tls import server_tls
from weft.testing.store_contract import CompactionContract, StoreContract

NODE = "node-1"
OWN = f"status/nodes/{NODE}/"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


class TestRemoteOverSocket(StoreContract):
    root = OWN
    largest = MAX_STATUS

    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        socket = tmp_path / "store.sock"
        async with (
            open_any(SqliteStoreSettings(path=str(tmp_path / "store.db"))) as behind,
            serving_store(behind, unix=socket),
            open_store([f"unix:{socket}"], node=NODE) as opened,
        ):
            yield opened


class TestRemoteOverTls(StoreContract):
    root = OWN
    largest = MAX_STATUS

    @pytest.fixture
    async def store(self, tmp_path: Path, authority: Authority) -> AsyncIterator[Store]:
        server = authority.issue("server", subject="/CN=master")
        client = authority.issue("node", subject=f"/OU=weft:nodes/CN={NODE}")

        port = free_port()
        tls = server_tls(server.cert, server.key, client_ca=authority.ca)
        files = {"ca": str(client.ca), "cert": str(client.cert), "key": str(client.key)}
        async with (
            open_any(SqliteStoreSettings(path=str(tmp_path / "store.db"))) as behind,
            serving_store(behind, addresses=(("127.0.0.1", port),), tls=tls),
            open_store([f"https://127.0.0.1:{port}"], node=NODE, **files) as opened,
        ):
            yield opened


class TestRemoteCompaction(CompactionContract):
    root = OWN

    @pytest.fixture
    async def short_store(self, tmp_path: Path) -> AsyncIterator[Store]:
        socket = tmp_path / "store.sock"
        async with (
            open_any(SqliteStoreSettings(path=str(tmp_path / "store.db"), history=50)) as behind,
            serving_store(behind, unix=socket),
            open_store([f"unix:{socket}"], node=NODE) as opened,
        ):
            yield opened
