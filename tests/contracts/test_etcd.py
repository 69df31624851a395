"""The store contract on a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from weft.adapters.stores.etcd import open_store
from weft.lab.servers.etcd import Etcd
from weft.ports.store import Put, Store
from weft.testing.store_contract import CompactionContract, StoreContract


@pytest.fixture
async def store(etcd: Etcd, root: str) -> AsyncIterator[Store]:
    async with open_store(etcd.endpoints, root=root) as opened:
        yield opened


@pytest.fixture
def short_store(store: Store) -> Store:
    return store


class TestEtcd(StoreContract):
    pass


class TestEtcdCompaction(CompactionContract):
    @pytest.fixture(autouse=True)
    def keep_server(self, etcd: Etcd) -> None:
        self.etcd = etcd

    async def compact_history(self, store: Store) -> None:
        """An operator compacts the cluster."""
        revision = await store.commit([], [Put(self.key("filler"), b"")])
        async with aiohttp.ClientSession() as session:
            url = f"{self.etcd.endpoints[0]}/v3/kv/compaction"
            async with session.post(url, json={"revision": revision}) as answer:
                assert answer.status == 200
