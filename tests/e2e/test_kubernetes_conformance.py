"""The network specs of the Kubernetes project on a cluster with Weft, without kube-proxy and CoreDNS.

docs/kubernetes-conformance.md lists the specs that must pass, and the reason for each of the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.conformance import PASSED, known_specs, run_specs
from tests.support.kubernetes.namespaces import isolated_cluster
from tests.support.paths import DOCS

TABLE = DOCS / "kubernetes-conformance.md"
PASSES = "passes"
# The specs that the table must list, by a part of their names.
ASKED = r"\[sig-network\].*(\[Conformance\]|Netpol)"

# A few quick ones of all kinds.
QUICK = (
    "Networking Granular Checks: Pods should function for intra-pod communication: udp",
    "Services should serve multiport endpoints from pods",
    "DNS should provide DNS for the cluster",
)
QUICK_WITHIN, WITHIN = 300.0, 5400.0
AT_ONCE = 4


def read_table() -> dict[str, str]:
    """Specs, by a unique part of their names, and their expected results."""
    rows = (line.split("|") for line in TABLE.read_text().splitlines() if line.startswith("| `"))
    return {row[1].strip().strip("`"): row[2].strip() for row in rows}


@pytest.fixture
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    async with isolated_cluster(kubernetes) as cluster:
        for name in ("one", "two"):
            await cluster.node(name, "--node-ttl", "30")
        yield cluster


@pytest.mark.timeout(QUICK_WITHIN + 300)
async def test_a_few_quick_specs(cluster: Cluster, kubernetes_e2e: Path, tmp_path: Path) -> None:
    """They run and pass."""
    results = await run_specs(
        cluster, QUICK, programs=kubernetes_e2e, report=tmp_path, within=QUICK_WITHIN, at_once=len(QUICK)
    )
    assert [each.result for each in results] == [PASSED] * len(QUICK), results


@pytest.mark.soak
@pytest.mark.timeout(WITHIN + 600)
async def test_all_specs_that_the_table_expects_to_pass(cluster: Cluster, kubernetes_e2e: Path, tmp_path: Path) -> None:
    """Every spec with the expected result "passes" runs and passes."""
    specs = [name for name, result in read_table().items() if result == PASSES]
    results = await run_specs(cluster, specs, programs=kubernetes_e2e, report=tmp_path, within=WITHIN, at_once=AT_ONCE)
    assert [each for each in results if each.result != PASSED] == []
    assert [each for each in specs if not any(each in spec.name for spec in results)] == []


@pytest.mark.soak
async def test_the_table_is_complete(kubernetes_e2e: Path) -> None:
    """Every conformance spec and every policy spec has a row."""
    table = read_table()
    known = await known_specs(kubernetes_e2e, focus=ASKED)
    assert [name for name in known if not any(row in name for row in table)] == []
