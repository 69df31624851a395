"""One real etcd for all tests of a worker; each test has its own root in it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.kubernetes.api_server import ApiServer, running_api_server
from tests.support.kubernetes.manifests import RBAC, apply

from weft.lab.servers.etcd import Etcd, running_etcd


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Etcd]:
    async with running_etcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def kube(tmp_path_factory: pytest.TempPathFactory, kube_apiserver: Path) -> AsyncIterator[ApiServer]:
    """One real API server for all tests of a worker, with the rights of our programs. Each test has its own node."""
    async with running_api_server(tmp_path_factory.mktemp("kube"), programs=kube_apiserver) as server:
        async with server.client() as admin:
            await apply(admin, RBAC)
        yield server


@pytest.fixture
def root() -> str:
    return f"/{uuid.uuid4()}/"
