"""Pods of a real Kubernetes cluster whose nodes have containerd 2: unlike Debian's older one it asks for our STATUS."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.kubernetes.cluster import WITHIN, Cluster, holds
from tests.support.kubernetes.documents import pod
from tests.support.kubernetes.namespaces import cluster_apart

from weft.lab.traffic import reaches
from weft.lab.waiting import eventually, until


async def is_ready(cluster: Cluster, node: str) -> bool:
    return holds(await cluster.api.get(f"/api/v1/nodes/{node}"), "Ready")


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_pods_come_and_go_and_a_node_without_agent_is_not_ready(kubernetes: Path, containerd_2: Path) -> None:
    """Its STATUS is what kubelet takes for the node's network, so people see at once that the agent is away."""
    async with cluster_apart(kubernetes, containerd=containerd_2) as cluster:
        one, two = [await cluster.node(name, "--node-ttl", "30") for name in ("one", "two")]
        told = (await cluster.api.get("/api/v1/nodes/one"))["status"]["nodeInfo"]["containerRuntimeVersion"]
        assert told.startswith("containerd://2.")
        await cluster.apply(pod("a", node="one"), pod("b", node="two"))
        a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
        assert await reaches(a, b, port=9000)
        assert await cluster.heard("a", str(b.address)) == ["b"]

        async def away() -> bool:
            return not await is_ready(cluster, "two")

        two.kill()
        await eventually(away, bool, within=WITHIN)
        assert await is_ready(cluster, "one")
        assert await reaches(a, b, port=9000)
        await two.start()
        await cluster.ready("two")
        for name in "ab":
            await cluster.remove("pod", name)
        await until(lambda: not any(any((node.root / "run" / "netns").iterdir()) for node in (one, two)))
