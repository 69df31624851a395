"""The steps of docs/migrating.md: migrate a cluster from the reference plugins to Weft, node by node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support import inventory
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.documents import PORT, daemon_set, deployment
from tests.support.kubernetes.installed import import_weft_image, manifest_for, own_pods
from tests.support.kubernetes.namespaces import isolated_cluster
from tests.support.kubernetes.node import Node
from tests.support.runtimes import run_checked

from weft.lab.waiting import until

NODES = ("one", "two")
FORMER = {"one": "10.77.1", "two": "10.77.2"}
PLUGINS = ("bridge", "host-local", "portmap")
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "web"},
    "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": PORT}]},
}


async def install_former(cluster: Cluster) -> None:
    """Install the reference plugins on every node, with a subnet and a bridge each, and routes between them."""
    for name, node in cluster.nodes.items():
        programs, lists = node.root / "opt" / "cni" / "bin", node.root / "etc" / "cni" / "net.d"
        for plugin in PLUGINS:
            shutil.copy(Path("/usr/lib/cni", plugin), programs)
        lists.mkdir(parents=True, exist_ok=True)
        ranges = [[{"subnet": f"{FORMER[name]}.0/24"}]]
        ipam = {"type": "host-local", "ranges": ranges, "routes": [{"dst": "0.0.0.0/0"}]}
        bridge = {"type": "bridge", "bridge": "former0", "isGateway": True, "ipam": ipam}
        plugins = [bridge, {"type": "portmap", "capabilities": {"portMappings": True}}]
        network = {"cniVersion": "1.0.0", "name": "former", "plugins": plugins}
        (lists / "05-former.conflist").write_text(json.dumps(network))
        await run_checked(*node.command("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
        for other in cluster.nodes.values():
            if other is not node:
                await run_checked(
                    *node.command("ip", "route", "add", f"{FORMER[other.name]}.0/24", "via", other.address)
                )


async def clean(node: Node) -> None:
    """Step 6 for these plugins: remove the bridge, the routes, the programs and their state."""
    await run_checked(*node.command("ip", "link", "delete", "former0"))
    for other in FORMER:
        if other != node.name:
            await run_checked(*node.command("ip", "route", "delete", f"{FORMER[other]}.0/24"))
    for plugin in PLUGINS:
        (node.root / "opt" / "cni" / "bin" / plugin).unlink()
    memory = node.root / "var" / "lib" / "cni"
    assert len(list((memory / "networks" / "former").glob("10.77.*"))) == 1, "more is left than the DaemonSet's pod"
    shutil.rmtree(memory / "networks")
    for result in (memory / "results").glob("former-*"):
        result.unlink()


def is_former(pod: Any) -> bool:
    return any(pod["status"]["podIP"].startswith(f"{lead}.") for lead in FORMER.values())


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_a_cluster_is_migrated_from_the_reference_plugins_node_by_node(kubernetes: Path) -> None:
    """Pods on the same plugin reach each other all the time; in the end all pods do, and nothing old is left."""
    async with isolated_cluster(kubernetes, bare=True) as cluster:
        for name in NODES:
            await cluster.bare_node(name)
        await install_former(cluster)
        for name in NODES:
            await cluster.ready(name)
        await cluster.apply(deployment("web", replicas=4), daemon_set("each"), SERVICE)
        former = [*await cluster.pods_ready("web", count=4), *await cluster.pods_ready("each", count=2)]
        assert all(map(is_former, former))
        await assert_all_reach(cluster, former)
        await import_weft_image(cluster)
        await cluster.kubectl("label", "node", NODES[0], "node-role.kubernetes.io/control-plane=")
        for number, name in enumerate(NODES):
            await move(cluster, name, first=number == 0)
            moved = NODES[: number + 1]
            pods = [*await cluster.pods_ready("web", count=4), *await cluster.pods_ready("each", count=2)]
            assert all(is_former(pod) == (pod["spec"]["nodeName"] not in moved) for pod in pods)
            for side in (True, False):
                await assert_all_reach(cluster, [pod for pod in pods if is_former(pod) == side])
        pods = await cluster.pods_ready("web", count=4)
        address = (await cluster.api.get("/api/v1/namespaces/default/services/web"))["spec"]["clusterIP"]
        for pod in pods:
            (answered,) = await cluster.fetch_names(pod["metadata"]["name"], address, port=80)
            assert answered in {each["metadata"]["name"] for each in pods}
        for node in cluster.nodes.values():
            assert not [name for name in inventory.devices(node.netns) if name.startswith(("former", "veth"))]
            assert {each.name for each in (node.root / "etc" / "cni" / "net.d").iterdir()} == {"10-weft.conflist"}


async def assert_all_reach(cluster: Cluster, pods: list[Any]) -> None:
    """Requested from inside the pods: opening a pod netns here would keep its devices alive."""
    for one in pods:
        names = {each["status"]["podIP"]: each["metadata"]["name"] for each in pods if each is not one}
        assert await cluster.fetch_names(one["metadata"]["name"], *names) == list(names.values())


async def move(cluster: Cluster, name: str, *, first: bool) -> None:
    """ "A node" in the guide, step by step."""
    node = cluster.nodes[name]
    sandboxes = node.root / "run" / "netns"
    await cluster.kubectl("drain", name, "--ignore-daemonsets")
    await until(lambda: len(list(sandboxes.iterdir())) == 1)  # that of the DaemonSet
    (node.root / "etc" / "cni" / "net.d" / "05-former.conflist").unlink()
    if first:
        await cluster.kubectl("apply", "-f", str(manifest_for(cluster)))
        for app in ("weft-netplugin", "weft-netdns"):
            await own_pods(cluster, app, count=2)
    (former_pod,) = [each for each in await cluster.pods_ready("each", count=2) if each["spec"]["nodeName"] == name]
    assert is_former(former_pod)
    await cluster.remove("pod", former_pod["metadata"]["name"])
    await cluster.pods_ready("each", count=2)
    await until(lambda: len(list(sandboxes.iterdir())) == 1)
    await clean(node)
    await cluster.kubectl("uncordon", name)
