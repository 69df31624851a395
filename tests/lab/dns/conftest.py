"""Tenant netns with pods, and the real netdns."""

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
    from tests.lab.conftest import MakeNetns


class MakePod(Protocol):
    """Creates a pod and, if needed, the netns of its tenant."""

    def __call__(self, tenant: str) -> Pod: ...


@pytest.fixture
def make_pod(make_netns: MakeNetns, tmp_path: Path) -> Iterator[MakePod]:
    pods = NamespaceDirectory(tmp_path / "pods")
    pods.prepare()
    with ExitStack() as closing:
        yield lambda tenant: Pod(
            closing.enter_context(pods.create(f"in-{tenant}")), tenant=make_netns(tenant).namespace
        )


@pytest.fixture
async def netdns(directory: NamespaceDirectory, tmp_path: Path) -> AsyncIterator[Netdns]:
    """A running netdns. Its log is shown when a test fails."""
    netdns = Netdns(tmp_path)
    try:
        await netdns.start()
        yield netdns
    finally:
        netdns.kill()
        sys.stderr.write(netdns.log.read_text())
