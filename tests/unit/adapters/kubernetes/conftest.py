"""A scripted API server for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.support.kube_script import Scripted, scripted_server

from weft.adapters.kubernetes.credentials import ClientConfig


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    async with scripted_server() as scripted:
        yield scripted


@pytest.fixture
def client_config(server: Scripted) -> ClientConfig:
    return ClientConfig(servers=(server.url,), token="secret")
