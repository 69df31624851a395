"""The image of packaging/Containerfile, built from scratch and deployed with our manifest."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.support.kubernetes.documents import deployment
from tests.support.kubernetes.installed import manifest_for, netctl, own_pods
from tests.support.kubernetes.namespaces import isolated_cluster

from weft.lab.traffic import eventually_reaches

NODES = ("one", "two")


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_a_cluster_runs_on_the_shipped_image(kubernetes: Path, shipped_image: Path) -> None:
    """netmaster, agents and netdns run from it, nodes get its CNI plugin, and pods reach each other."""
    async with isolated_cluster(kubernetes, bare=True) as cluster:
        for name in NODES:
            node = await cluster.bare_node(name)
            await node.import_image(shipped_image)
        await cluster.kubectl("label", "node", NODES[0], "node-role.kubernetes.io/control-plane=")
        await cluster.kubectl("apply", "-f", str(manifest_for(cluster)))
        for name in NODES:
            await cluster.ready(name)
        for app, count in (("weft-netmaster", 1), ("weft-netplugin", 2), ("weft-netdns", 2)):
            await own_pods(cluster, app, count=count)
        await netctl(cluster, "tenant", "create", "blue")
        await cluster.apply(deployment("web", replicas=4))
        places = [cluster.place(each) for each in await cluster.pods_ready("web", count=4)]
        for one, other in itertools.permutations(places, 2):
            assert await eventually_reaches(one, other, port=9000)
