"""One real etcd for all tests of a worker; each test has a root of its own in it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from weft.testing.etcd import Etcd, running_etcd


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Etcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def root() -> str:
    return f"/{uuid.uuid4()}/"
