"""One lab with two hosts beside a real API server for all tests here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.support.kubernetes.fake_cluster import PaperCluster, open_paper_cluster

from weft.lab.namespaces import stepped_apart
from weft.lab.netlab import open_lab


@pytest.fixture(scope="module", autouse=True)
def apart() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("the lab makes namespaces, which takes root")
    with stepped_apart():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kube(kube_apiserver: Path, apart: None) -> AsyncIterator[PaperCluster]:
    async with open_lab() as lab:
        try:
            async with open_paper_cluster(lab, programs=kube_apiserver) as cluster:
                yield cluster
        finally:
            lab.tell_logs()
