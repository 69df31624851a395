"""The embedded store keeps the contract, and its file is safe."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weft.adapters.stores.sqlite import open_store
from weft.ports.store import Store
from weft.testing.contracts import CompactionContract, StoreContract


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "store.db") as opened:
        yield opened


@pytest.fixture
async def short_store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(tmp_path / "short.db", history=50) as opened:
        yield opened


class TestSqlite(StoreContract):
    pass


class TestSqliteCompaction(CompactionContract):
    pass
