"""A netmaster for each REST test, in the test's own process and on an empty store."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from weft.lab.servers.masters import Rest, running_master


@pytest.fixture
async def rest() -> AsyncIterator[Rest]:
    async with running_master() as started:
        yield started
