"""Tenants' spaces with pods, and the real netdns beside them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import pytest
from tests.support.netdns import Netdns, Pod

from weft.kernel.netns import NamespaceDirectory

if TYPE_CHECKING:
    from tests.lab.conftest import MakeSpace


class MakePod(Protocol):
    """Makes a pod in the space of a tenant, which is made too."""

    def __call__(self, tenant: str) -> Pod: ...


@pytest.fixture
def make_pod(make_space: MakeSpace, tmp_path: Path) -> Iterator[MakePod]:
    pods = NamespaceDirectory(tmp_path / "pods")
    pods.prepare()
    with ExitStack() as closing:
        yield lambda tenant: Pod(
            closing.enter_context(pods.create(f"in-{tenant}")), tenant=make_space(tenant).namespace
        )


@pytest.fixture
async def netdns(directory: NamespaceDirectory, tmp_path: Path) -> AsyncIterator[Netdns]:
    """Running. What it logged is shown when a test fails."""
    netdns = Netdns(tmp_path)
    try:
        await netdns.start()
        yield netdns
    finally:
        netdns.kill()
        sys.stderr.write(netdns.log.read_text())
