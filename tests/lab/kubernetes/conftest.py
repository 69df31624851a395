"""One lab with two hosts beside a real API server for all tests here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.kubernetes.kubeletless_cluster import KubeletlessCluster, open_kubeletless_cluster

from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import open_lab


@pytest.fixture(scope="module", autouse=True)
def isolated() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("creating namespaces needs root")
    with private_namespaces():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kube(kube_apiserver: Path, isolated: None) -> AsyncIterator[KubeletlessCluster]:
    async with open_lab() as lab:
        try:
            async with open_kubeletless_cluster(lab, programs=kube_apiserver) as cluster:
                yield cluster
        finally:
            lab.print_logs()
