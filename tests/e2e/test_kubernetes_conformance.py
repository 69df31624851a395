"""The Kubernetes project judges a cluster of ours, without kube-proxy and CoreDNS, by its own specs on networks.

Which of them we are held to is said in docs/kubernetes-conformance.md, where the others stand with the reason.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.conformance import PASSED, judge, known_specs
from tests.support.kubernetes.namespaces import cluster_apart
from tests.support.paths import DOCS

TABLE = DOCS / "kubernetes-conformance.md"
PASSES = "passes"
# The specs of which the table must tell, by a part of their names.
ASKED = r"\[sig-network\].*(\[Conformance\]|Netpol)"

# A few that are not long in coming, of all kinds.
QUICK = (
    "Networking Granular Checks: Pods should function for intra-pod communication: udp",
    "Services should serve multiport endpoints from pods",
    "DNS should provide DNS for the cluster",
)
QUICK_WITHIN, WITHIN = 300.0, 5400.0
AT_ONCE = 4


def read_table() -> dict[str, str]:
    """Specs, by a part of their names that is no other's, and what becomes of them."""
    rows = (line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `"))
    return {row[1].strip().strip("`"): row[2].strip() for row in rows}


@pytest.fixture
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    async with cluster_apart(kubernetes) as cluster:
        for name in ("one", "two"):
            await cluster.node(name, "--node-ttl", "30")
        yield cluster


@pytest.mark.timeout(QUICK_WITHIN + 300)
async def test_a_few_that_are_quick(cluster: Cluster, kubernetes_judge: Path, tmp_path: Path) -> None:
    """They are run, and pass."""
    judged = await judge(
        cluster, QUICK, programs=kubernetes_judge, report=tmp_path, within=QUICK_WITHIN, at_once=len(QUICK)
    )
    assert [each.outcome for each in judged] == [PASSED] * len(QUICK), judged


@pytest.mark.soak
@pytest.mark.timeout(WITHIN + 600)
async def test_what_the_kubernetes_project_asks_of_a_network(
    cluster: Cluster, kubernetes_judge: Path, tmp_path: Path
) -> None:
    """Every one that the table says passes is run, and passes."""
    specs = [name for name, outcome in read_table().items() if outcome == PASSES]
    judged = await judge(cluster, specs, programs=kubernetes_judge, report=tmp_path, within=WITHIN, at_once=AT_ONCE)
    assert [each for each in judged if each.outcome != PASSED] == []
    assert [each for each in specs if not any(each in spec.name for spec in judged)] == []


@pytest.mark.soak
async def test_the_table_leaves_none_out(kubernetes_judge: Path) -> None:
    """Every spec for conformance and every one on policies has its row."""
    table = read_table()
    known = await known_specs(kubernetes_judge, focus=ASKED)
    assert [name for name in known if not any(row in name for row in table)] == []
