"""A cluster in private namespaces, for tests as root. The logs of its programs are printed when a test fails."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.kubernetes.cluster import Cluster, open_cluster
from tests.support.runtimes import mount_private_directories

from weft.lab.namespaces import private_namespaces
from weft.lab.netlab import open_lab


@asynccontextmanager
async def isolated_cluster(
    programs: Path, *, bare: bool = False, datapath: str = "linux", containerd: Path | None = None
) -> AsyncIterator[Cluster]:
    """See `open_cluster`: without nodes yet, and without Weft where it is `bare`."""
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with private_namespaces():
        mount_private_directories()
        async with open_lab(datapath=datapath) as lab:
            try:
                async with open_cluster(lab, programs=programs, containerd=containerd, bare=bare) as cluster:
                    yield cluster
            finally:
                lab.print_logs()
