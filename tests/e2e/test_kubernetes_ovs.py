"""Pods of a real Kubernetes cluster whose two nodes have Open vSwitch: they come, speak, are kept apart, and go."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support import inventory
from tests.support.kubernetes.cluster import WITHIN, Cluster
from tests.support.kubernetes.documents import pod
from tests.support.kubernetes.namespaces import cluster_apart
from tests.support.switch_inventory import ports

from weft.lab.dig import dig
from weft.lab.traffic import never_reaches, reaches
from weft.lab.waiting import eventually, until

CLOSED = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "closed"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}


@pytest.fixture
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    async with cluster_apart(kubernetes, datapath="ovs") as cluster:
        for name in ("one", "two"):
            await cluster.node(name, "--node-ttl", "30")  # the machine may be busy
        yield cluster


@pytest.mark.timeout(600)
async def test_pods_come_speak_are_kept_apart_and_go(cluster: Cluster) -> None:
    """Between two nodes, probed by their kubelets, and with names.

    Each port names its pod by the UID (S-20), and none is left of a pod that went.
    """
    await cluster.apply(*(pod(name, node=node) for name, node in (("a", "one"), ("b", "two"))))
    pods = [await cluster.pod_ready(name) for name in "ab"]
    a, b = map(cluster.place, pods)
    assert await reaches(a, b, port=9000)
    assert await dig(a.namespace, "kubernetes.default.svc.cluster.local", server="10.96.0.10") == ["10.96.0.1"]
    switches = [node.switch for node in cluster.nodes.values() if node.switch is not None]
    for switch, each in zip(switches, pods, strict=True):
        assert each["metadata"]["uid"] in switch.configure("--columns=external_ids", "list", "interface")
    await cluster.apply(CLOSED)
    await eventually(
        lambda: cluster.kubectl("events", "--for", "networkpolicy/closed"),
        lambda told: "in force on 3 nodes" in told,
        within=WITHIN,
    )
    assert await never_reaches(a, b, port=9000)
    await cluster.kubectl("delete", "networkpolicy", "closed")
    assert await reaches(a, b, port=9000)
    for name in "ab":
        await cluster.remove("pod", name)
    await until(lambda: not [name for switch in switches for name in ports(switch) if name.startswith("wp")])
    await inventory.settled(cluster.lab)
    assert inventory.stored(await cluster.lab.rest.state()) == set()
