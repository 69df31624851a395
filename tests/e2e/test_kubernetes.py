"""Pods of a real Kubernetes cluster on our network: kubelet, containerd and our CNI program on two nodes.

One cluster serves all tests here; each takes away what it made.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from weft.testing import inventory
from weft.testing.apart import stepped_apart
from weft.testing.kubernetes.cluster import Cluster, open_cluster
from weft.testing.kubernetes.documents import PORT, deployment, pod
from weft.testing.netlab import open_lab
from weft.testing.runtimes import take_own_disk
from weft.testing.streams import Stream
from weft.testing.traffic import reaches
from weft.testing.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    if os.geteuid() != 0:
        pytest.skip("containers need root")
    with stepped_apart():
        take_own_disk()
        async with open_lab() as lab:
            try:
                async with open_cluster(lab, programs=kubernetes) as cluster:
                    for name in ("one", "two"):
                        await cluster.node(name, "--node-ttl", "30")  # the machine may be busy
                    yield cluster
            finally:
                lab.tell_logs()


async def held(cluster: Cluster) -> set[str]:
    """The addresses in use, on which kernel, rules, ledger and store agree."""
    await inventory.settled(cluster.lab)
    return {held.address for held in inventory.stored(await cluster.lab.rest.state())}


async def nothing_left(cluster: Cluster) -> None:
    """Return when no address is taken and no device is left on any node."""
    await until(lambda: not any(inventory.spaces(node) for node in cluster.nodes.values()))
    assert await held(cluster) == set()


async def test_a_pod_comes_and_goes(cluster: Cluster) -> None:
    """It gets its address from our pool, its host reaches it, and nothing of it is left."""
    await cluster.apply(pod("a"), pod("b"))
    a, b = [await cluster.pod_ready(name) for name in "ab"]
    addresses = [each["status"]["podIP"] for each in (a, b)]
    assert await held(cluster) == set(addresses)
    assert await cluster.heard("a", addresses[1]) == ["b"]
    for name in "ab":
        await cluster.remove("pod", name)
    await nothing_left(cluster)


async def test_every_pod_of_a_deployment_reaches_every_other(cluster: Cluster) -> None:
    """On both nodes. Probes of all three kinds pass, and no container was started twice."""
    probes = {
        "readinessProbe": {"httpGet": {"port": PORT}, "periodSeconds": 1},
        "livenessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "startupProbe": {"exec": {"command": ["/bin/cat", "/tmp/index.html"]}, "periodSeconds": 1},
    }
    await cluster.apply(deployment("web", replicas=4, **probes))
    pods = await cluster.pods_ready("web", count=4)
    assert {each["spec"]["nodeName"] for each in pods} == {"one", "two"}
    addresses = {each["status"]["podIP"] for each in pods}
    assert await held(cluster) == addresses
    for one, other in itertools.permutations(map(cluster.place, pods), 2):
        assert await reaches(one, other, port=9000)
    names = [each["metadata"]["name"] for each in pods]
    assert await cluster.heard(names[0], *(each["status"]["podIP"] for each in pods)) == names
    for each in await cluster.pods_ready("web", count=4):
        assert each["status"]["containerStatuses"][0]["restartCount"] == 0
    await cluster.remove("deployment", "web")
    await nothing_left(cluster)


async def test_what_people_do_with_a_pod(cluster: Cluster) -> None:
    """`kubectl logs`, `kubectl exec`, and a port of the node that leads to it."""
    await cluster.apply(pod("a", node="one", ports=[{"containerPort": PORT, "hostPort": 18080}]))
    await cluster.pod_ready("a")
    assert await cluster.kubectl("logs", "a") == "serving\n"
    assert await cluster.kubectl("exec", "a", "--", "hostname") == "a\n"
    address = cluster.nodes["one"].address
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}:18080/") as answer:
        assert await answer.text() == "a\n"
    await cluster.remove("pod", "a")
    await nothing_left(cluster)


async def test_an_agent_that_is_killed_disturbs_no_pod(cluster: Cluster) -> None:
    """No packet between two nodes is lost, and a pod that comes meanwhile only waits."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    assert await reaches(a, b, port=9000)
    with Stream(a, b, port=9000, rate=100) as stream:
        for node in cluster.nodes.values():
            node.kill()
        await cluster.apply(pod("late", node="one"))
        for node in cluster.nodes.values():
            await node.start()
        late = cluster.place(await cluster.pod_ready("late"))
        stream.stop()
        assert await stream.missing() == []
    assert await reaches(late, b, port=9000)
    for name in ("a", "b", "late"):
        await cluster.remove("pod", name)
    await nothing_left(cluster)


async def test_an_api_server_that_is_killed_disturbs_no_pod(cluster: Cluster) -> None:
    """Pods go on speaking while it is away, and come and go when it is back."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    cluster.server.kill()
    assert await reaches(a, b, port=9000)
    await cluster.server.start()
    await cluster.remove("pod", "a")
    await cluster.apply(pod("c", node="one"))
    assert await reaches(b, cluster.place(await cluster.pod_ready("c")), port=9000)
    for name in "bc":
        await cluster.remove("pod", name)
    await nothing_left(cluster)


async def test_a_node_that_reboots_leaks_nothing(cluster: Cluster) -> None:
    """Its pods come back in new sandboxes, and the addresses of the old ones are free again."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    former = await cluster.pod_ready("a")
    await cluster.pod_ready("b")
    node = cluster.nodes["one"]
    await cluster.lab.reboot(node)
    await node.start_containers()
    a = await cluster.pod_started_again(former)
    b = await cluster.pod_ready("b")
    assert await held(cluster) == {each["status"]["podIP"] for each in (a, b)}
    assert await reaches(cluster.place(a), cluster.place(b), port=9000)
    for name in "ab":
        await cluster.remove("pod", name)
    await nothing_left(cluster)
