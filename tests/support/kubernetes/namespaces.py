"""A cluster in namespaces of its own, for tests as root. What its programs logged is shown when a test fails."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.kubernetes.cluster import Cluster, open_cluster
from tests.support.runtimes import take_own_disk

from weft.lab.namespaces import stepped_apart
from weft.lab.netlab import open_lab


@asynccontextmanager
async def cluster_apart(
    programs: Path, *, bare: bool = False, datapath: str = "linux", containerd: Path | None = None
) -> AsyncIterator[Cluster]:
    """See `open_cluster`: without nodes yet, and without Weft where it is `bare`."""
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with stepped_apart():
        take_own_disk()
        async with open_lab(datapath=datapath) as lab:
            try:
                async with open_cluster(lab, programs=programs, containerd=containerd, bare=bare) as cluster:
                    yield cluster
            finally:
                lab.tell_logs()
