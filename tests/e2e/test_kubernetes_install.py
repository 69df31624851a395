"""Install Weft in a bare cluster with `kubectl apply -f` of one file, and operate it.

One cluster serves all tests, in order.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tests.support import inventory
from tests.support.kubernetes.cluster import WITHIN, Cluster
from tests.support.kubernetes.documents import deployment, pod
from tests.support.kubernetes.installed import import_weft_image, manifest_for, netctl, own_pods
from tests.support.kubernetes.manifests import UNINSTALL
from tests.support.kubernetes.namespaces import isolated_cluster
from tests.support.sequence_stream import Stream

import weft
from weft.lab.dig import dig
from weft.lab.traffic import eventually_reaches, never_reaches
from weft.lab.waiting import eventually, until

NODES = ("one", "two")
AGENT, NAMES = "weft-netplugin", "weft-netdns"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    """A cluster where Weft was installed from its image and manifest only."""
    async with isolated_cluster(kubernetes, bare=True) as cluster:
        for name in NODES:
            await cluster.bare_node(name)
        await import_weft_image(cluster)
        await cluster.kubectl("label", "node", NODES[0], "node-role.kubernetes.io/control-plane=")
        await cluster.kubectl("apply", "-f", str(manifest_for(cluster)))
        for name in NODES:
            await cluster.ready(name)
        yield cluster


async def remove_and_wait(cluster: Cluster, *objects: str) -> None:
    """Delete objects, and wait until no pod netns is left on any node."""
    for target in objects:
        await cluster.remove(*target.split("/"))
    await until(lambda: not any(any((node.root / "run" / "netns").iterdir()) for node in cluster.nodes.values()))


async def test_pods_of_both_nodes_reach_each_other(cluster: Cluster) -> None:
    """Agents and netmaster use their service accounts only; each node has its own certificate."""
    await cluster.apply(deployment("web", replicas=4))
    pods = await cluster.pods_ready("web", count=4)
    assert {each["spec"]["nodeName"] for each in pods} == set(NODES)
    for one, other in itertools.permutations(map(cluster.place, pods), 2):
        assert await eventually_reaches(one, other, port=9000)
    await remove_and_wait(cluster, "deployment/web")


async def test_tenants_policies_and_dns(cluster: Cluster) -> None:
    """A tenant created by netctl is isolated; NetworkPolicy is enforced; cluster DNS answers."""
    await netctl(cluster, "tenant", "create", "blue")
    await netctl(cluster, "network", "create", "-t", "blue", "--subnet", "10.9.0.0/16", "--gateway", "10.9.0.1", "net")
    blue = {"io.contiv.tenant": "blue", "io.contiv.network": "net"}
    service = {"ports": [{"port": 80}], "selector": {"app": "absent"}}
    await cluster.apply(
        *(pod(f"blue-{node}", node=node, labels=blue) for node in NODES),
        pod("a", node="one"),
        pod("b", node="two", labels={"closed": "yes"}),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service},
    )
    one, two, a, b = [cluster.place(await cluster.pod_ready(name)) for name in ("blue-one", "blue-two", "a", "b")]
    assert one.address in ip_network("10.9.0.0/16")
    assert await eventually_reaches(one, two, port=9000)
    assert await eventually_reaches(a, b, port=9000)
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
    assert await eventually_reaches(b, a, port=9000)
    await cluster.kubectl("delete", "networkpolicy/closed", "service/web")
    await remove_and_wait(cluster, "pod/blue-one", "pod/blue-two", "pod/a", "pod/b")


async def test_replacing_agents_interrupts_no_traffic(cluster: Cluster) -> None:
    """All agent pods are deleted during a packet stream: no packet is lost, and DNS answers meanwhile."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    assert await eventually_reaches(a, b, port=9000)
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
    assert await eventually_reaches(late, b, port=9000)
    await remove_and_wait(cluster, "pod/a", "pod/b", "pod/late")


def pairs(cluster: Cluster) -> dict[str, bytes]:
    """Key and certificate of each node."""
    place = Path("var", "lib", "weft", "membership", "node.pem")
    return {name: (node.root / place).read_bytes() for name, node in cluster.nodes.items()}


async def test_node_certificates_are_renewed_without_interruption(cluster: Cluster) -> None:
    """No packet is lost, pods start, and nothing restarts."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    assert await eventually_reaches(a, b, port=9000)
    agents = await own_pods(cluster, AGENT, count=2)
    with Stream(a, b, port=9000, rate=100) as stream:
        before = pairs(cluster)
        assert before["one"] != before["two"]
        await until(lambda: all(pair != before[name] for name, pair in pairs(cluster).items()))
        await cluster.apply(*(pod(f"late-{node}", node=node) for node in NODES))
        one, two = [cluster.place(await cluster.pod_ready(f"late-{node}")) for node in NODES]
        stream.stop()
        assert await stream.missing() == []
    assert await eventually_reaches(one, two, port=9000)
    after = await own_pods(cluster, AGENT, count=2)
    assert sorted(map(starts, after)) == sorted(map(starts, agents))
    await remove_and_wait(cluster, "pod/a", "pod/b", "pod/late-one", "pod/late-two")


def starts(agent: Any) -> tuple[str, int]:
    """The UID of the pod and the restart count of its container."""
    return agent["metadata"]["uid"], agent["status"]["containerStatuses"][0]["restartCount"]


async def versions(cluster: Cluster) -> dict[str, str]:
    """The version of each node's agent."""
    return {node["name"]: node["version"] for node in json.loads(await netctl(cluster, "node", "ls", "--json"))}


@pytest.mark.soak
async def test_upgrade_and_rollback_interrupt_no_traffic(cluster: Cluster) -> None:
    """First the agents one by one, with two versions side by side, then netmaster, then the rollback."""
    old, new = weft.__version__, "99.0.0"
    image = await import_weft_image(cluster, version=new)
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    assert await eventually_reaches(a, b, port=9000)
    with Stream(a, b, port=9000, rate=100) as stream:
        await roll(cluster, f"daemonset/{AGENT}", f"netplugin={image}", f"install-cni={image}")
        assert await versions(cluster) == dict.fromkeys(NODES, new)
        assert f"Server version: {old}" in await netctl(cluster, "version")
        await cluster.apply(pod("between", node="one"))
        between = cluster.place(await cluster.pod_ready("between"))
        await roll(cluster, "deployment/weft-netmaster", f"netmaster={image}")
        assert f"Server version: {new}" in await netctl(cluster, "version")
        await netctl(cluster, "group", "create", "-t", "default", "default-net", "written-by-the-newer")
        for what in (f"daemonset/{AGENT}", "deployment/weft-netmaster"):
            await cluster.kubectl("rollout", "undo", "-n", "kube-system", what)
            await wait_for_rollout(cluster, what)
        assert await versions(cluster) == dict.fromkeys(NODES, old)
        assert "written-by-the-newer" in await netctl(cluster, "group", "ls")
        stream.stop()
        assert await stream.missing() == []
    assert await eventually_reaches(between, b, port=9000)
    await netctl(cluster, "group", "rm", "written-by-the-newer")
    await remove_and_wait(cluster, "pod/a", "pod/b", "pod/between")


async def roll(cluster: Cluster, what: str, *images: str) -> None:
    """Set other images for our pods, and wait for the rollout."""
    await cluster.kubectl("set", "image", "-n", "kube-system", what, *images)
    await wait_for_rollout(cluster, what)


async def wait_for_rollout(cluster: Cluster, what: str) -> None:
    await cluster.kubectl("rollout", "status", "-n", "kube-system", what, f"--timeout={WITHIN:.0f}s")


async def test_uninstalling_leaves_clean_nodes(cluster: Cluster) -> None:
    """No device, namespace, rule, route, program, configuration or state of ours is left on any node."""
    await cluster.kubectl("delete", "-f", str(manifest_for(cluster)))
    for app in (AGENT, NAMES, "weft-netmaster"):
        await own_pods(cluster, app, count=0)
    await cluster.kubectl("apply", "-f", str(UNINSTALL))
    await own_pods(cluster, "weft-uninstall", count=2)
    for node in cluster.nodes.values():
        assert inventory.devices(node.netns) == {"eth0"}
        assert inventory.run_json(node.netns, "nft", "-j", "list", "tables")["nftables"][1:] == []
        routes = inventory.run_json(node.netns, "ip", "-j", "route", "show", "table", "all")
        assert {each["dev"] for each in routes} <= {"eth0", "lo"}
        rules = inventory.run_json(node.netns, "ip", "-j", "rule")
        assert {each["table"] for each in rules} <= {"local", "main", "default"}
        assert [each.name for each in (node.root / "opt" / "cni" / "bin").iterdir()] == ["loopback"]
        assert list((node.root / "etc" / "cni" / "net.d").iterdir()) == []
        for place in (("run", "weft"), ("var", "lib", "weft")):
            assert not node.root.joinpath(*place).exists()
    await cluster.kubectl("delete", "-f", str(UNINSTALL))
    await own_pods(cluster, "weft-uninstall", count=0)
