"""A Kubernetes cluster with containerd 2, which calls STATUS, unlike Debian's older version."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.kubernetes.cluster import WITHIN, Cluster, holds
from tests.support.kubernetes.documents import pod
from tests.support.kubernetes.namespaces import isolated_cluster

from weft.lab.traffic import eventually_reaches
from weft.lab.waiting import eventually, until


async def is_ready(cluster: Cluster, node: str) -> bool:
    return holds(await cluster.api.get(f"/api/v1/nodes/{node}"), "Ready")


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_pods_work_and_a_node_without_agent_is_not_ready(kubernetes: Path, containerd_2: Path) -> None:
    """kubelet reports the result of STATUS as the node's network readiness."""
    async with isolated_cluster(kubernetes, containerd=containerd_2) as cluster:
        one, two = [await cluster.node(name, "--node-ttl", "30") for name in ("one", "two")]
        version = (await cluster.api.get("/api/v1/nodes/one"))["status"]["nodeInfo"]["containerRuntimeVersion"]
        assert version.startswith("containerd://2.")
        await cluster.apply(pod("a", node="one"), pod("b", node="two"))
        a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
        assert await eventually_reaches(a, b, port=9000)
        assert await cluster.fetch_names("a", str(b.address)) == ["b"]

        async def is_not_ready() -> bool:
            return not await is_ready(cluster, "two")

        two.kill()
        await eventually(is_not_ready, bool, within=WITHIN)
        assert await is_ready(cluster, "one")
        assert await eventually_reaches(a, b, port=9000)
        await two.start()
        await cluster.ready("two")
        for name in "ab":
            await cluster.remove("pod", name)
        await until(lambda: not any(any((node.root / "run" / "netns").iterdir()) for node in (one, two)))
