"""Weft in a bare cluster with etcd as its store: netmaster is stateless and may run on any node."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.support.kubernetes.documents import deployment
from tests.support.kubernetes.installed import import_weft_image, manifest_for, netctl, own_pods
from tests.support.kubernetes.namespaces import isolated_cluster

from weft.lab.partition import PartitionProxy
from weft.lab.servers.etcd import running_etcd
from weft.lab.servers.processes import free_port
from weft.lab.traffic import eventually_reaches

NODES = ("one", "two")
CONTROLS = "node-role.kubernetes.io/control-plane"


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_stateless_netmaster_moves_to_another_node(kubernetes: Path) -> None:
    """The objects are still there, pods start and reach each other, and no node had to enroll."""
    async with isolated_cluster(kubernetes, bare=True) as cluster:
        lab = cluster.lab
        etcd_port = free_port()
        async with (
            running_etcd(lab.directory / "store") as etcd,
            PartitionProxy((lab.address, etcd_port), to=("127.0.0.1", int(etcd.endpoints[0].rpartition(":")[2]))),
        ):
            for name in NODES:
                await cluster.bare_node(name)
            await import_weft_image(cluster)
            await cluster.kubectl("label", "node", "one", f"{CONTROLS}=")
            manifest = manifest_for(cluster, etcd=f"http://{lab.address}:{etcd_port}")
            await cluster.kubectl("apply", "-f", str(manifest))
            for name in NODES:
                await cluster.ready(name)
            await own_pods(cluster, "weft-netmaster", count=1)
            await netctl(cluster, "tenant", "create", "blue")
            await cluster.kubectl("label", "node", "one", f"{CONTROLS}-")
            await cluster.kubectl("label", "node", "two", f"{CONTROLS}=")
            await cluster.kubectl("delete", "pod", "-n", "kube-system", "-l", "app=weft-netmaster")
            (moved,) = await own_pods(cluster, "weft-netmaster", count=1)
            assert moved["spec"]["nodeName"] == "two"
            assert "blue" in await netctl(cluster, "tenant", "ls")
            await cluster.apply(deployment("web", replicas=4))
            places = [cluster.place(each) for each in await cluster.pods_ready("web", count=4)]
            for one, other in itertools.permutations(places, 2):
                assert await eventually_reaches(one, other, port=9000)
            assert not [node for node in cluster.nodes.values() if _is_enrolled(node.root)]


def _is_enrolled(root: Path) -> bool:
    return (root / "var" / "lib" / "weft" / "membership" / "node.pem").exists()
