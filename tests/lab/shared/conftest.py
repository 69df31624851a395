"""One lab with two hosts for all tests of a module; each test has its own tenant. A module's `STORE` selects the store.

The lab has the default mode unless the fixture is parametrized with another (`weft.lab.netlab.lab_modes`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest
import pytest_asyncio
from tests.support.external_hosts import RANGES, add_ipv6_underlay, external_client
from tests.support.kube_feed import KubeFeed, kube_feed
from tests.support.tenant_fixture import TenantFixture

from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import NetLab, lab_modes, open_lab
from weft.lab.traffic import NetnsAddress


@pytest.fixture(scope="module", autouse=True)
def isolated() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("creating namespaces needs root")
    with private_namespaces():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(request: pytest.FixtureRequest, isolated: None) -> AsyncIterator[NetLab]:
    store, modes = getattr(request.module, "STORE", "embedded"), lab_modes(getattr(request, "param", "linux"))
    async with open_lab(store=store, **modes) as lab:
        await asyncio.gather(lab.host("one"), lab.host("two"))
        yield lab


@pytest.fixture(scope="module")
def make_tenant(lab: NetLab) -> Callable[[], TenantFixture]:
    """Creates tenants with consecutive numbers."""
    numbers = itertools.count(1)
    return lambda: TenantFixture(lab, f"t{next(numbers)}")


@pytest_asyncio.fixture(loop_scope="module")
async def testbed(lab: NetLab, make_tenant: Callable[[], TenantFixture]) -> AsyncIterator[TenantFixture]:
    testbed = make_tenant()
    await testbed.build()
    try:
        yield testbed
    finally:
        lab.print_logs()


@pytest.fixture(scope="module")
def underlay(lab: NetLab) -> None:
    """Add IPv6 to the underlay."""
    add_ipv6_underlay(lab)


@pytest.fixture
def external(isolated: None) -> Iterator[dict[int, NetnsAddress]]:
    """A client outside the cluster, by family."""
    with ExitStack() as closing:
        yield external_client(closing)


@pytest_asyncio.fixture(loop_scope="module")
async def feed(lab: NetLab, testbed: TenantFixture) -> AsyncIterator[KubeFeed]:
    """Kubernetes Services of the tenant."""
    async with kube_feed(lab, testbed.tenant) as feed:
        yield feed


@pytest_asyncio.fixture(loop_scope="module")
async def external_ranges(testbed: TenantFixture) -> AsyncIterator[None]:
    """Assign the external ranges to the tenant for the test."""
    flags = " ".join(f"--external-range {each}" for each in RANGES.values())
    await testbed.netctl(f"tenant create {testbed.tenant} --force {flags}")
    yield
    await testbed.netctl(f"tenant create {testbed.tenant} --no-external-range")
