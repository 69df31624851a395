"""A scripted API server for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.adapters.kubernetes.credentials import Access
from weft.testing.kube_script import Scripted, scripted_server


@pytest.fixture
async def server() -> AsyncIterator[Scripted]:
    async with scripted_server() as scripted:
        yield scripted


@pytest.fixture
def access(server: Scripted) -> Access:
    return Access(servers=(server.url,), token="secret")
