"""The Kubernetes project judges a cluster of ours, without kube-proxy and CoreDNS, by its own specs on networks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.testing.apart import stepped_apart
from weft.testing.kubernetes.cluster import open_cluster
from weft.testing.kubernetes.conformance import judge
from weft.testing.netlab import open_lab
from weft.testing.runtimes import take_own_disk

SPECS = (
    "Networking Granular Checks: Pods should function for intra-pod communication: http",
    "Netpol NetworkPolicy between server and client should support a 'default-deny-ingress' policy",
    "NetworkPolicy between server and client using UDP should support a 'default-deny-ingress' policy",
)
"""Those that we are held to, by a part of their names. The others have not been tried here yet."""

SKIPPED = r"SCTP|\[Slow\]|\[Serial\]|\[Disruptive\]"
WITHIN = 3000.0


@pytest.fixture
def apart() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with stepped_apart():
        take_own_disk()
        yield


@pytest.mark.soak
@pytest.mark.timeout(WITHIN + 600)
async def test_what_the_kubernetes_project_asks_of_a_network(
    apart: None, kubernetes: Path, kubernetes_judge: Path, tmp_path: Path
) -> None:
    """Every one of the specs is run, and passes."""
    async with open_lab() as lab, open_cluster(lab, programs=kubernetes) as cluster:
        for name in ("one", "two"):
            await cluster.node(name, "--node-ttl", "30")
        focus = "|".join(map(re.escape, SPECS))
        specs = await judge(
            cluster, programs=kubernetes_judge, focus=focus, skip=SKIPPED, report=tmp_path, within=WITHIN
        )
    assert [each for each in specs if each.outcome != "passed"] == []
    assert [each for each in SPECS if not any(each in spec.name for spec in specs)] == []
