"""Weft in a bare cluster with an etcd as its store: netmaster keeps nothing on its node, and may be anywhere."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.support.kubernetes.documents import deployment
from tests.support.kubernetes.installed import bring_image, manifest_for, netctl, own_pods
from tests.support.kubernetes.namespaces import cluster_apart

from weft.lab.partition import Partition
from weft.lab.servers.etcd import running_etcd
from weft.lab.servers.processes import free_port
from weft.lab.traffic import reaches

NODES = ("one", "two")
CONTROLS = "node-role.kubernetes.io/control-plane"


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_a_netmaster_moves_to_another_node_with_nothing_in_its_hands(kubernetes: Path) -> None:
    """What was declared is there, pods start and reach each other, and no node has had to join."""
    async with cluster_apart(kubernetes, bare=True) as cluster:
        lab = cluster.lab
        etcd_port = free_port()
        async with (
            running_etcd(lab.directory / "store") as etcd,
            Partition((lab.address, etcd_port), to=("127.0.0.1", int(etcd.endpoints[0].rpartition(":")[2]))),
        ):
            for name in NODES:
                await cluster.bare_node(name)
            await bring_image(cluster)
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
                assert await reaches(one, other, port=9000)
            assert not [node for node in cluster.nodes.values() if _has_joined(node.root)]


def _has_joined(root: Path) -> bool:
    return (root / "var" / "lib" / "weft" / "membership" / "node.pem").exists()
