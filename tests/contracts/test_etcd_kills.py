"""etcd and its clients are killed, and connections cut: no event is lost or doubled, no acknowledged commit is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.support.proxy import Proxy
from tests.support.store_chaos import under_chaos
from tests.support.store_load import Commit, stress_process

from weft.adapters.stores.etcd import open_store
from weft.drivers import EtcdStoreSettings
from weft.lab.servers.etcd import Etcd, running_etcd
from weft.runtime.store.mirror import EVERYTHING

pytestmark = pytest.mark.timeout(300)  # starts many processes, on a machine that may be busy
SOAK = [pytest.mark.soak, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("kills", [35, pytest.param(400, marks=SOAK)])
async def test_the_server_is_killed(tmp_path: Path, kills: int) -> None:
    async with (
        running_etcd(tmp_path) as server,
        open_store(server.endpoints) as store,
        under_chaos(store, prefix="chaos/") as chaos,
    ):
        for _ in range(kills):
            await asyncio.sleep(random.uniform(0, 0.05))  # a random moment of the operation is the purpose
            await server.restart()
            await chaos.wait_for_progress()


@pytest.mark.parametrize("kills", [15, pytest.param(100, marks=SOAK)])
async def test_a_client_is_killed(etcd: Etcd, root: str, tmp_path: Path, kills: int) -> None:
    settings = EtcdStoreSettings(endpoints=etcd.endpoints, root=root)
    async with (
        open_store(etcd.endpoints, root=root) as store,
        under_chaos(store, prefix="chaos/", writers="a") as chaos,
    ):
        for _ in range(kills):
            with stress_process(settings, ("chaos/x", "chaos/y"), log=tmp_path / "log") as child:
                lines = [await child.next_line() for _ in range(3)]
                await asyncio.sleep(random.uniform(0, 0.05))  # a random moment of the operation is the purpose
                child.kill()
                lines += child.read_rest()
            chaos.acknowledged += [Commit.parse(line) for line in lines[2:]]


async def test_connections_are_cut(etcd: Etcd, root: str) -> None:
    async with Proxy(int(etcd.endpoints[0].rsplit(":", 1)[1])) as proxy:
        endpoint = f"http://127.0.0.1:{proxy.port}"
        async with open_store([endpoint], root=root) as store, under_chaos(store, prefix="chaos/") as chaos:
            for _ in range(20):
                await asyncio.sleep(random.uniform(0, 0.05))  # a random moment of the operation is the purpose
                await proxy.cut()
                await chaos.wait_for_progress()


async def test_a_stalled_connection_is_noticed(etcd: Etcd, root: str) -> None:
    """A watch on a stalled connection is reopened, through another endpoint if necessary."""
    async with Proxy(int(etcd.endpoints[0].rsplit(":", 1)[1])) as proxy:
        endpoints = (f"http://127.0.0.1:{proxy.port}", etcd.endpoints[0])
        async with open_store(endpoints, root=root) as store, under_chaos(store, prefix="chaos/") as chaos:
            proxy.stall()
            await chaos.wait_for_progress()
            assert (await store.list(EVERYTHING)).entries
