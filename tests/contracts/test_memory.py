"""The store contract on the in-memory store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.adapters.stores.memory import open_store
from weft.ports.store import Store
from weft.testing.store_contract import CompactionContract, StoreContract


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    async with open_store() as opened:
        yield opened


@pytest.fixture
async def short_store() -> AsyncIterator[Store]:
    async with open_store(history=50) as opened:
        yield opened


class TestMemory(StoreContract):
    pass


class TestMemoryCompaction(CompactionContract):
    pass
