"""Netmaster writes its format into every empty store, and does not touch a store of an older Weft."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from weft.adapters.stores import etcd as etcd_store
from weft.adapters.stores import memory, sqlite
from weft.domain import codec, kinds, model
from weft.domain.errors import Conflict
from weft.domain.ids import StoreKey
from weft.domain.lifecycle.store_format import FORMAT
from weft.lab.servers.etcd import Etcd
from weft.lab.servers.masters import running_master
from weft.lab.servers.processes import free_port
from weft.lab.waiting import soon
from weft.master.main import Netmaster
from weft.master.settings import MasterSettings, read_master_settings
from weft.ports.store import Put, Store

EVERYTHING = StoreKey("")


@pytest.fixture(params=["memory", "sqlite", "etcd"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, etcd: Etcd, root: str) -> AsyncIterator[Store]:
    async with AsyncExitStack() as stack:
        match request.param:
            case "memory":
                yield await stack.enter_async_context(memory.open_store())
            case "sqlite":
                yield await stack.enter_async_context(sqlite.open_store(tmp_path / "store.db"))
            case _:
                yield await stack.enter_async_context(etcd_store.open_store(etcd.endpoints, root=root))


@pytest.fixture
def settings(tmp_path: Path) -> MasterSettings:
    address = f"127.0.0.1:{free_port()}"
    flags = ["--external-address", address, "--internal-address", address, "--data-dir", str(tmp_path)]
    return read_master_settings([*flags, "--default-subnet", "none", "--single-machine"], {})


async def test_an_empty_store_gets_the_format_and_is_accepted_again(store: Store) -> None:
    for _ in range(2):
        async with running_master(store=store):
            pass
    marker = await store.read(kinds.FORMAT_KEY)
    assert marker is not None
    assert marker.value == str(FORMAT).encode()


async def test_a_store_of_an_older_weft_is_rejected_unchanged(store: Store, settings: MasterSettings) -> None:
    old = [
        Put(kinds.GLOBAL.store_key("global"), codec.encode(model.Global())),
        Put(StoreKey("wishes/receipt"), b"{}"),
        Put(StoreKey("status/nodes/n1/receipt"), b'{"v":1,"o":{"revision":7}}'),
    ]
    await store.commit([], old)
    before = await store.list(EVERYTHING)
    with pytest.raises(Conflict, match=r"older Weft.*empty store"):
        await soon(Netmaster(settings, store).run(asyncio.Event()))
    assert await store.list(EVERYTHING) == before
