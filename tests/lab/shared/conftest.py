"""One lab with two hosts for a module's tests, each in a town of its own. A module's `STORE` says which store.

It is a usual one, unless the fixture is parametrized with another's name (`weft.lab.lab_names`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest
import pytest_asyncio
from tests.support.external_hosts import RANGES, give_v6, the_world
from tests.support.kube_feed import KubeFeed, kube_feed
from tests.support.tenant_fixture import TenantFixture

from weft.lab.lab_names import lab_modes
from weft.lab.namespaces import stepped_apart
from weft.lab.netlab import NetLab, open_lab
from weft.lab.traffic import Place


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("the lab makes namespaces, which takes root")
    with stepped_apart():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(request: pytest.FixtureRequest, apart: None) -> AsyncIterator[NetLab]:
    store, modes = getattr(request.module, "STORE", "embedded"), lab_modes(getattr(request, "param", "linux"))
    async with open_lab(store=store, **modes) as lab:
        await asyncio.gather(lab.host("one"), lab.host("two"))
        yield lab


@pytest.fixture(scope="module")
def found(lab: NetLab) -> Callable[[], TenantFixture]:
    """Finds a place for another town."""
    numbers = itertools.count(1)
    return lambda: TenantFixture(lab, f"t{next(numbers)}")


@pytest_asyncio.fixture(loop_scope="module")
async def town(lab: NetLab, found: Callable[[], TenantFixture]) -> AsyncIterator[TenantFixture]:
    town = found()
    await town.build()
    try:
        yield town
    finally:
        lab.tell_logs()


@pytest.fixture(scope="module")
def underlay(lab: NetLab) -> None:
    """Hosts and the outside speak IPv6 too."""
    give_v6(lab)


@pytest.fixture
def world(apart: None) -> Iterator[dict[int, Place]]:
    """The outside, by family."""
    with ExitStack() as closing:
        yield the_world(closing)


@pytest_asyncio.fixture(loop_scope="module")
async def feed(lab: NetLab, town: TenantFixture) -> AsyncIterator[KubeFeed]:
    """Kubernetes' services of the town."""
    async with kube_feed(lab, town.tenant) as feed:
        yield feed


@pytest_asyncio.fixture(loop_scope="module")
async def owning(town: TenantFixture) -> AsyncIterator[None]:
    """The town has the external ranges while the test runs."""
    await town.netctl(f"tenant create {town.tenant} {' '.join(f'--external-range {each}' for each in RANGES.values())}")
    yield
    await town.netctl(f"tenant create {town.tenant}")
