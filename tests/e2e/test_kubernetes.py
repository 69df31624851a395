"""Pods of a real Kubernetes cluster on our network: kubelet, containerd and our CNI program on two nodes.

One cluster serves all tests; each removes its objects.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from ipaddress import ip_network
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from tests.support import inventory
from tests.support.kubernetes.cluster import WITHIN, Cluster
from tests.support.kubernetes.documents import PORT, deployment, pod
from tests.support.kubernetes.namespaces import isolated_cluster
from tests.support.kubernetes.node import Node
from tests.support.runtimes import run, run_checked
from tests.support.sequence_stream import Stream

from weft.lab.dig import dig
from weft.lab.traffic import eventually_reaches, never_reaches
from weft.lab.waiting import eventually, until

NODES = ("one", "two")
RESOLV_CONF = "/etc/resolv.conf"

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(kubernetes: Path) -> AsyncIterator[Cluster]:
    async with isolated_cluster(kubernetes) as cluster:
        for name in NODES:
            await cluster.node(name, "--node-ttl", "30")  # the machine may be busy
        yield cluster


async def used_addresses(cluster: Cluster) -> set[str]:
    """The addresses in use, after kernel, rules, attachment log and store agree."""
    await inventory.wait_consistent(cluster.lab)
    return {used_addresses.address for used_addresses in inventory.stored(await cluster.lab.rest.state())}


async def wait_until_clean(cluster: Cluster) -> None:
    """Wait until no address is in use and no pod device is left on any node. A tenant with services may stay."""
    await until(lambda: not any(leftovers(node) for node in cluster.nodes.values()))
    assert await used_addresses(cluster) == set()


def leftovers(node: Node) -> list[str]:
    """The devices and namespaces of pods on a node."""
    namespaces = [each.name for each in (node.root / "run" / "netns").iterdir()]
    try:
        devices = [name for netns in inventory.tenant_netns(node).values() for name in inventory.devices(netns)]
    except FileNotFoundError as error:
        return [str(error)]  # the namespace is being deleted
    return [*namespaces, *(name for name in devices if name.startswith("wp"))]


async def test_a_pod_is_created_and_deleted(cluster: Cluster) -> None:
    """It has an address of our pool, its host reaches it, and nothing is left after its deletion."""
    await cluster.apply(pod("a"), pod("b"))
    a, b = [await cluster.pod_ready(name) for name in "ab"]
    addresses = [each["status"]["podIP"] for each in (a, b)]
    assert await used_addresses(cluster) == set(addresses)
    assert await cluster.fetch_names("a", addresses[1]) == ["b"]
    for name in "ab":
        await cluster.remove("pod", name)
    await wait_until_clean(cluster)


async def test_every_pod_of_a_deployment_reaches_every_other(cluster: Cluster) -> None:
    """On both nodes. Probes of all three kinds succeed, and no container was restarted."""
    probes = {
        "readinessProbe": {"httpGet": {"port": PORT}, "periodSeconds": 1},
        "livenessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "startupProbe": {"exec": {"command": ["/bin/cat", "/tmp/index.html"]}, "periodSeconds": 1},
    }
    await cluster.apply(deployment("web", replicas=4, **probes))
    pods = await cluster.pods_ready("web", count=4)
    assert {each["spec"]["nodeName"] for each in pods} == {"one", "two"}
    addresses = {each["status"]["podIP"] for each in pods}
    assert await used_addresses(cluster) == addresses
    for one, other in itertools.permutations(map(cluster.place, pods), 2):
        assert await eventually_reaches(one, other, port=9000)
    names = [each["metadata"]["name"] for each in pods]
    assert await cluster.fetch_names(names[0], *(each["status"]["podIP"] for each in pods)) == names
    for each in await cluster.pods_ready("web", count=4):
        assert each["status"]["containerStatuses"][0]["restartCount"] == 0
    await cluster.remove("deployment", "web")
    await wait_until_clean(cluster)


async def test_logs_exec_and_host_port_of_a_pod(cluster: Cluster) -> None:
    """`kubectl logs`, `kubectl exec`, and a hostPort."""
    await cluster.apply(pod("a", node="one", ports=[{"containerPort": PORT, "hostPort": 18080}]))
    await cluster.pod_ready("a")
    assert await cluster.kubectl("logs", "a") == "serving\n"
    assert await cluster.kubectl("exec", "a", "--", "hostname") == "a\n"
    address = cluster.nodes["one"].address
    async with aiohttp.ClientSession() as session, session.get(f"http://{address}:18080/") as answer:
        assert await answer.text() == "a\n"
    await cluster.remove("pod", "a")
    await wait_until_clean(cluster)


async def test_killing_an_agent_affects_no_running_pod(cluster: Cluster) -> None:
    """No packet between two nodes is lost, and a pod created meanwhile only waits."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    assert await eventually_reaches(a, b, port=9000)
    with Stream(a, b, port=9000, rate=100) as stream:
        for node in cluster.nodes.values():
            node.kill()
        await cluster.apply(pod("late", node="one"))
        for node in cluster.nodes.values():
            await node.start()
        late = cluster.place(await cluster.pod_ready("late"))
        stream.stop()
        assert await stream.missing() == []
    assert await eventually_reaches(late, b, port=9000)
    for name in ("a", "b", "late"):
        await cluster.remove("pod", name)
    await wait_until_clean(cluster)


async def test_killing_netmaster_and_the_api_server_affects_no_running_pod(cluster: Cluster) -> None:
    """No packet is lost during the outage and after it, and pods can be created and deleted then."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    assert await eventually_reaches(a, b, port=9000)
    with Stream(a, b, port=9000, rate=100) as stream:
        cluster.lab.master.kill()
        cluster.server.kill()
        assert await eventually_reaches(b, a, port=9001)
        await cluster.lab.master.start()
        await cluster.server.start()
        await cluster.apply(pod("c", node="one"))
        assert await eventually_reaches(b, cluster.place(await cluster.pod_ready("c")), port=9001)
        stream.stop()
        assert await stream.missing() == []
    for name in "abc":
        await cluster.remove("pod", name)
    await wait_until_clean(cluster)


async def test_a_rebooted_node_leaks_nothing(cluster: Cluster) -> None:
    """Its pods are recreated in new sandboxes, and the old addresses are released."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    former = await cluster.pod_ready("a")
    await cluster.pod_ready("b")
    node = cluster.nodes["one"]
    await cluster.lab.reboot(node)
    await node.start_containers()
    a = await cluster.pod_started_again(former)
    b = await cluster.pod_ready("b")
    assert await used_addresses(cluster) == {each["status"]["podIP"] for each in (a, b)}
    assert await eventually_reaches(cluster.place(a), cluster.place(b), port=9000)
    for name in "ab":
        await cluster.remove("pod", name)
    await wait_until_clean(cluster)


async def test_a_service_is_created_changed_and_deleted_without_kube_proxy(cluster: Cluster) -> None:
    """K4: by address and by name, from pods of both nodes and from a node; all ready backends answer."""
    service = {"ports": [{"port": 80, "targetPort": PORT}], "selector": {"app": "web"}}
    await cluster.apply(
        deployment("web", replicas=1),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web"}, "spec": service},
        pod("a", node="one"),
        pod("b", node="two"),
    )
    (web,) = await cluster.pods_ready("web", count=1)
    address = (await cluster.api.get("/api/v1/namespaces/default/services/web"))["spec"]["clusterIP"]
    for name in "ab":
        place = cluster.place(await cluster.pod_ready(name))
        assert await cluster.fetch_names(name, address, port=80) == [web["metadata"]["name"]]
        servers = [
            line.split() for line in (await cluster.kubectl("exec", name, "--", "cat", RESOLV_CONF)).splitlines()
        ]
        (server,) = [words[1] for words in servers if words[0] == "nameserver"]
        assert await dig(place.namespace, "web.default.svc.cluster.local", server=server) == [address]
    node = cluster.nodes["one"]
    assert web["metadata"]["name"] in await run_checked(*node.command("curl", "--silent", f"http://{address}/"))
    name = "web.default.svc.cluster.local"
    assert (await run_checked(*node.command("dig", "+short", f"@{server}", name))).split() == [address]
    await cluster.kubectl("scale", "deployment", "web", "--replicas=2")
    names = {each["metadata"]["name"] for each in await cluster.pods_ready("web", count=2)}
    answered: set[str] = set()

    async def all_answered() -> bool:
        answered.update(await cluster.fetch_names("a", *[address] * 8, port=80))
        return answered == names

    await eventually(all_answered, bool, within=WITHIN)
    await cluster.kubectl("delete", "service", "web")
    request = node.command("curl", "--silent", "--max-time", "2", f"http://{address}/")
    await eventually(lambda: run(*request), lambda ran: ran.exit_code != 0, within=WITHIN)
    await cluster.remove("deployment", "web")
    for name in "ab":
        await cluster.remove("pod", name)
    await wait_until_clean(cluster)


async def test_a_network_policy_is_enforced_and_deleted(cluster: Cluster) -> None:
    """Once the Realized event exists, only its own node reaches the pod: probes succeed and it stays ready."""
    await cluster.apply(pod("a", node="one"), pod("b", node="two"))
    a, b = [cluster.place(await cluster.pod_ready(name)) for name in "ab"]
    await cluster.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "closed"},
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
        }
    )
    await eventually(
        lambda: cluster.kubectl("events", "--for", "networkpolicy/closed"),
        lambda output: "realized on 3 nodes" in output,
        within=WITHIN,
    )
    assert await never_reaches(b, a, port=9000)
    assert await never_reaches(a, b, port=9000)
    await cluster.pod_ready("a")
    await cluster.kubectl("delete", "networkpolicy", "closed")
    assert await eventually_reaches(b, a, port=9000)
    for name in "ab":
        await cluster.remove("pod", name)
    await wait_until_clean(cluster)


async def test_labels_select_tenants_which_are_isolated(cluster: Cluster) -> None:
    """K3: labels of a pod or its namespace select tenant, network and group; without labels, the defaults."""
    await cluster.lab.tenant("blue")
    await cluster.lab.network("net", tenant="blue", subnet="10.9.0.0/16", gateway="10.9.0.1")
    await cluster.lab.group("web", network="net", tenant="blue")
    blue = {"io.contiv.tenant": "blue", "io.contiv.network": "net"}
    inside = pod("inside", node="two")
    inside["metadata"]["namespace"] = "blues"
    await cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "blues", "labels": blue}})
    await cluster.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace=blues")
    await cluster.apply(
        *(pod(f"blue-{node}", node=node, labels={**blue, "io.contiv.net-group": "web"}) for node in NODES),
        pod("other", node="one"),
        inside,
    )
    one, two = [cluster.place(await cluster.pod_ready(f"blue-{node}")) for node in NODES]
    other = cluster.place(await cluster.pod_ready("other"))
    await cluster.kubectl(
        "wait", "--for=condition=Ready", "pod/inside", "--namespace=blues", f"--timeout={WITHIN:.0f}s"
    )
    third = cluster.place(await cluster.api.get("/api/v1/namespaces/blues/pods/inside"))
    assert one.address in ip_network("10.9.0.0/16")
    assert other.address not in ip_network("10.9.0.0/16")
    for each in (two, third):
        assert await eventually_reaches(one, each, port=9000)
        assert await eventually_reaches(each, one, port=9000)
        assert await never_reaches(other, each, port=9000)
        assert await never_reaches(each, other, port=9000)
    assert (await cluster.lab.rest.oper("endpointGroups", "blue:web"))["numEndpoints"] == len(NODES)
    for name in ("blue-one", "blue-two", "other"):
        await cluster.remove("pod", name)
    await cluster.kubectl("delete", "namespace", "blues", "--wait")
    await wait_until_clean(cluster)
