"""Pods of a Kubernetes cluster with two Open vSwitch nodes: creation, connectivity, isolation and deletion."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.kubernetes.cluster import WITHIN, Cluster
from tests.support.kubernetes.documents import pod
from tests.support.kubernetes.namespaces import isolated_cluster
from tests.support.switch_inventory import ports

from weft.lab.dig import dig
from weft.lab.traffic import eventually_reaches, never_reaches
from weft.lab.waiting import eventually, until

CLOSED = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "closed"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}


@pytest.fixture
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    async with isolated_cluster(kubernetes, datapath="ovs") as cluster:
        for name in ("one", "two"):
            await cluster.node(name, "--node-ttl", "30")  # the machine may be busy
        yield cluster


@pytest.mark.timeout(600)
async def test_connectivity_policy_and_deletion_of_pods(cluster: Cluster) -> None:
    """Across two nodes, with kubelet probes and DNS.

    Each port has the UID of its pod (S-20), and no port of a deleted pod is left.
    """
    await cluster.apply(*(pod(name, node=node) for name, node in (("a", "one"), ("b", "two"))))
    pods = [await cluster.pod_ready(name) for name in "ab"]
    a, b = map(cluster.place, pods)
    assert await eventually_reaches(a, b, port=9000)
    assert await dig(a.namespace, "kubernetes.default.svc.cluster.local", server="10.96.0.10") == ["10.96.0.1"]
    switches = [node.switch for node in cluster.nodes.values() if node.switch is not None]
    for switch, each in zip(switches, pods, strict=True):
        assert each["metadata"]["uid"] in switch.configure("--columns=external_ids", "list", "interface")
    await cluster.apply(CLOSED)
    await eventually(
        lambda: cluster.kubectl("events", "--for", "networkpolicy/closed"),
        lambda output: "realized on 3 nodes" in output,
        within=WITHIN,
    )
    assert await never_reaches(a, b, port=9000)
    await cluster.kubectl("delete", "networkpolicy", "closed")
    assert await eventually_reaches(a, b, port=9000)
    for name in "ab":
        await cluster.remove("pod", name)
    await until(lambda: not [name for switch in switches for name in ports(switch) if name.startswith("wp")])
    await inventory.wait_consistent(cluster.lab)
    assert inventory.stored(await cluster.lab.rest.state()) == set()
