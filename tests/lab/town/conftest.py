"""One lab with two hosts for a module's tests, each in a town of its own. A module's `STORE` says which store."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

from weft.testing.apart import stepped_apart
from weft.testing.netlab import NetLab, open_lab
from weft.testing.towns import Town


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("the lab makes namespaces, which takes root")
    with stepped_apart():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(request: pytest.FixtureRequest, apart: None) -> AsyncIterator[NetLab]:
    async with open_lab(store=getattr(request.module, "STORE", "embedded")) as lab:
        await asyncio.gather(lab.host("one"), lab.host("two"))
        yield lab


@pytest.fixture(scope="module")
def found(lab: NetLab) -> Callable[[], Town]:
    """Finds a place for another town."""
    numbers = itertools.count(1)
    return lambda: Town(lab, f"t{next(numbers)}")


@pytest_asyncio.fixture(loop_scope="module")
async def town(lab: NetLab, found: Callable[[], Town]) -> AsyncIterator[Town]:
    town = found()
    await town.build()
    try:
        yield town
    finally:
        lab.tell_logs()
