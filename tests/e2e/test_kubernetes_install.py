"""Weft in a cluster that has nothing of it: `kubectl apply -f` one file, and live with it.

One cluster serves all tests here, in their order.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path

import pytest
import pytest_asyncio

from weft.testing.apart import stepped_apart
from weft.testing.digging import dig
from weft.testing.kubernetes.cluster import WITHIN, Cluster, open_cluster
from weft.testing.kubernetes.documents import deployment, pod
from weft.testing.kubernetes.installed import bring_image, manifest_for, netctl, own_pods
from weft.testing.netlab import open_lab
from weft.testing.runtimes import take_own_disk
from weft.testing.streams import Stream
from weft.testing.traffic import never_reaches, reaches
from weft.testing.waiting import eventually, until

NODES = ("one", "two")
AGENT, NAMES = "weft-netplugin", "weft-netdns"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    """A cluster with Weft in it, by nothing but its image and its manifest."""
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with stepped_apart():
        take_own_disk()
        async with open_lab() as lab:
            try:
                async with open_cluster(lab, programs=kubernetes, bare=True) as cluster:
                    for name in NODES:
                        await cluster.bare_node(name)
                    await bring_image(cluster)
                    await cluster.kubectl("label", "node", NODES[0], "node-role.kubernetes.io/control-plane=")
                    await cluster.kubectl("apply", "-f", str(manifest_for(cluster)))
                    for name in NODES:
                        await cluster.ready(name)
                    yield cluster
            finally:
                lab.tell_logs()


async def emptied(cluster: Cluster, *things: str) -> None:
    """Remove things; return when no namespace of a pod is left on any node."""
    for thing in things:
        await cluster.remove(*thing.split("/"))
    await until(lambda: not any(any((node.root / "run" / "netns").iterdir()) for node in cluster.nodes.values()))


async def test_pods_of_both_nodes_reach_each_other(cluster: Cluster) -> None:
    """Agents and netmaster are their service accounts and nobody else; each node has a certificate of its own."""
    await cluster.apply(deployment("web", replicas=4))
    pods = await cluster.pods_ready("web", count=4)
    assert {each["spec"]["nodeName"] for each in pods} == set(NODES)
    for one, other in itertools.permutations(map(cluster.place, pods), 2):
        assert await reaches(one, other, port=9000)
    await emptied(cluster, "deployment/web")


async def test_tenants_policies_and_names(cluster: Cluster) -> None:
    """A tenant made by netctl beside netmaster is apart from all others; NetworkPolicy holds; cluster DNS answers."""
    await netctl(cluster, "tenant", "create", "blue")
    await netctl(cluster, "network", "create", "-t", "blue", "--subnet", "10.9.0.0/16", "--gateway", "10.9.0.1", "net")
    blue = {"io.contiv.tenant": "blue", "io.contiv.network": "net"}
    service = {"ports": [{"port": 80}], "selector": {"app": "nobody"}}
    await cluster.apply(
        *(pod(f"blue-{node}", node=node, labels=blue) for node in NODES),
        pod("a", node="one"),
        pod("b", node="two", labels={"closed": "yes"}),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service},
    )
    one, two, a, b = [cluster.place(await cluster.pod_ready(name)) for name in ("blue-one", "blue-two", "a", "b")]
    assert one.address in ip_network("10.9.0.0/16")
    assert await reaches(one, two, port=9000)
    assert await reaches(a, b, port=9000)
    assert await never_reaches(a, one, port=9000)
    address = (await cluster.api.get("/api/v1/namespaces/default/services/web"))["spec"]["clusterIP"]
    for place in (a, b):
        assert await dig(place.namespace, "web.default.svc.cluster.local", server="10.96.0.10") == [address]
    await cluster.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "closed"},
            "spec": {"podSelector": {"matchLabels": {"closed": "yes"}}, "policyTypes": ["Ingress"]},
        }
    )
    await eventually(lambda: never_reaches(a, b, port=9000), bool, within=WITHIN)
    assert await reaches(b, a, port=9000)
    await cluster.kubectl("delete", "networkpolicy/closed", "service/web")
    await emptied(cluster, "pod/blue-one", "pod/blue-two", "pod/a", "pod/b")


async def test_agents_that_are_replaced_cut_nothing(cluster: Cluster) -> None:
    """The pods of all agents are deleted under a stream of packets: none is lost, and names are answered meanwhile."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    assert await reaches(a, b, port=9000)
    before = {each["metadata"]["uid"] for each in await own_pods(cluster, AGENT, count=2)}
    with Stream(a, b, port=9000, rate=100) as stream:
        await cluster.kubectl("delete", "pod", "-n", "kube-system", "-l", f"app={AGENT}", "--wait=false")
        await dig(a.namespace, "kubernetes.default.svc.cluster.local", server="10.96.0.10")

        async def replaced() -> bool:
            after = {each["metadata"]["uid"] for each in await own_pods(cluster, AGENT, count=2)}
            return not before & after

        await eventually(replaced, bool, within=WITHIN)
        await cluster.apply(pod("late", node="one"))
        late = cluster.place(await cluster.pod_ready("late"))
        stream.stop()
        assert await stream.missing() == []
    assert await reaches(late, b, port=9000)
    await emptied(cluster, "pod/a", "pod/b", "pod/late")
