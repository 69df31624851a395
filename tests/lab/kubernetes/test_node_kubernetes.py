"""A real API server and two nodes, tested with packets: K3, K4, W46, W47."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from tests.support import inventory
from tests.support.kubernetes.kubeletless_cluster import POLICIES, SERVICES, KubeletlessCluster
from tests.support.responders import answering, query

from weft.cni.errors import CniError
from weft.lab.dig import dig
from weft.lab.hosts import Host, Pod
from weft.lab.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

DENY = {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]}


@pytest.fixture
def hosts(kube: KubeletlessCluster) -> tuple[Host, Host]:
    return kube.lab.hosts["one"], kube.lab.hosts["two"]


@pytest_asyncio.fixture(loop_scope="module")
async def pods(kube: KubeletlessCluster, hosts: tuple[Host, Host]) -> AsyncIterator[tuple[Pod, Pod, Pod]]:
    """`web` and a client beside it on one host, a client on the other; all deleted after the test."""
    one, two = hosts
    web = await kube.pod(one, "web", app="web")
    near = await kube.pod(one, "near", app="near")
    far = await kube.pod(two, "far", app="far")
    yield web, near, far
    for pod in (web, near, far):
        await pod.remove()
    await kube.delete_pods("web", "near", "far")
    for policy in await kube.api.items(POLICIES):
        await kube.api.delete(f"{POLICIES}/{policy['metadata']['name']}")


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition holds."""
    await eventually(condition, bool)


async def test_labels_select_tenant_and_network_with_defaults_of_the_namespace(
    kube: KubeletlessCluster, hosts: tuple[Host, Host]
) -> None:
    """K3, and tenants are separated."""
    one, two = hosts
    await kube.lab.tenant("blue")
    await kube.lab.network("net", tenant="blue", subnet="10.7.0.0/16")
    await kube.lab.network("other", tenant="blue", subnet="10.8.0.0/16")
    usual = await kube.pod(one, "k3-usual")
    chosen = await kube.pod(two, "k3-chosen", io__contiv__tenant="blue", io__contiv__network="other")
    defaults = {"io.contiv.tenant": "blue", "io.contiv.network": "net"}
    await kube.api.patch("/api/v1/namespaces/lab", {"metadata": {"labels": defaults}})
    await eventually(
        lambda: kube.lab.rest.get("kubeNamespaces", "lab"),
        lambda found: found.body["labels"].items() >= defaults.items(),
    )
    await asyncio.gather(*(_wait_in_sync(kube, host) for host in hosts))
    default = await kube.pod(one, "k3-default")
    assert [str(each.address()).split(".")[:2] for each in (usual, chosen, default)] == [
        ["10", "224"],
        ["10", "8"],
        ["10", "7"],
    ]
    await wait_until(lambda: default.eventually_reaches(chosen))
    assert await usual.never_reaches(default)
    await kube.api.patch("/api/v1/namespaces/lab", {"metadata": {"labels": dict.fromkeys(defaults)}})
    for pod in (usual, chosen, default):
        await pod.remove()
    await kube.delete_pods("k3-usual", "k3-chosen", "k3-default")
    await eventually(
        lambda: kube.lab.rest.get("kubeNamespaces", "lab"),
        lambda found: not found.body["labels"].keys() & defaults.keys(),
    )
    await asyncio.gather(*(_wait_in_sync(kube, host) for host in hosts))


async def _wait_in_sync(kube: KubeletlessCluster, host: Host) -> None:
    """Return when the host has applied everything in the store."""
    (await kube.lab.rest.put("tenants", tenantName=f"mark-{host.name}")).accepted()
    answer = await kube.lab.rest.send("DELETE", f"/api/v1/tenants/mark-{host.name}/?wait=60")
    answer.accepted()


async def test_policies_are_enforced_and_follow_labels(kube: KubeletlessCluster, pods: tuple[Pod, Pod, Pod]) -> None:
    """W47: NetworkPolicy was a stub. On the same node and from another; by pods, by namespaces, by named ports."""
    web, near, far = pods
    await wait_until(lambda: near.eventually_reaches(web))
    await wait_until(lambda: far.eventually_reaches(web))
    await kube.policy("deny", **DENY)
    await wait_until(lambda: near.never_reaches(web))
    await wait_until(lambda: far.never_reaches(web))
    friends = {"podSelector": {"matchLabels": {"friend": "yes"}}}
    await kube.policy("allow", **DENY, ingress=[{"from": [friends], "ports": [{"port": "http"}]}])
    await kube.relabel("far", friend="yes")
    await wait_until(lambda: far.eventually_reaches(web))
    assert await far.never_reaches(web, port=81)
    assert await near.never_reaches(web)
    await kube.relabel("far", friend=None)
    await wait_until(lambda: far.never_reaches(web))
    everyone = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "lab"}}}
    await kube.policy("all", **DENY, ingress=[{"from": [everyone]}])
    await wait_until(lambda: near.eventually_reaches(web, port=81))
    for name in ("deny", "allow", "all"):
        await kube.api.delete(f"{POLICIES}/{name}")
    await kube.relabel("web", app="none")
    await wait_until(lambda: far.eventually_reaches(web))


async def test_events_report_the_realization_of_a_policy(
    kube: KubeletlessCluster, hosts: tuple[Host, Host], pods: tuple[Pod, Pod, Pod]
) -> None:
    """Events on the policy: realized on both nodes, not realized on a dead one, and realized once it is back."""
    web, near, _ = pods
    _, two = hosts
    await kube.policy("early", **DENY)
    assert await _event_message(kube, "early", "Realized") == "realized on 2 nodes"
    assert await near.never_reaches(web)
    two.kill()
    await kube.policy("late", **DENY)
    assert "two" in await _event_message(kube, "late", "NotRealized")
    await two.start()
    assert await _event_message(kube, "late", "Realized") == "realized on 2 nodes"


async def test_H9_H6_a_long_name_and_a_costly_policy_isolate(
    kube: KubeletlessCluster, pods: tuple[Pod, Pod, Pod]
) -> None:
    """As packets: a name with a long label is enforced, and a policy past the bound lets nothing through."""
    web, near, far = pods
    await kube.relabel("web", app="web")
    long_name = "a" * 200
    await kube.policy(long_name, **DENY)
    await wait_until(lambda: near.never_reaches(web))
    await kube.api.delete(f"{POLICIES}/{long_name}")
    await wait_until(lambda: near.eventually_reaches(web))
    rules = [
        {"from": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": [f"172.{16 + (i >> 8)}.{i & 255}.0/24"]}}]}
        for i in range(1100)
    ]
    await kube.policy("costly", **DENY, ingress=rules)
    await wait_until(lambda: near.never_reaches(web))
    assert await far.never_reaches(web)
    assert await web.eventually_reaches(near)
    assert "the limit is 1000000" in await _event_message(kube, "costly", "UnsupportedRules")
    await kube.api.delete(f"{POLICIES}/costly")
    await wait_until(lambda: near.eventually_reaches(web))
    await kube.relabel("web", app="none")


async def _event_message(kube: KubeletlessCluster, policy: str, reason: str) -> str:
    """The message of the Event with this reason on a policy."""
    about = f"involvedObject.kind=NetworkPolicy,involvedObject.name={policy},reason={reason}"
    path = f"/api/v1/namespaces/lab/events?fieldSelector={about}"
    (event,) = await eventually(lambda: kube.api.items(path), bool)
    message: str = event["message"]
    return message


async def test_a_pod_is_isolated_from_its_first_to_its_last_packet(
    kube: KubeletlessCluster, hosts: tuple[Host, Host], pods: tuple[Pod, Pod, Pod]
) -> None:
    """A pod whose object is deleted or replaced stays isolated as long as it can send packets."""
    _, near, far = pods
    one, _ = hosts
    await kube.policy("deny", **{**DENY, "podSelector": {"matchLabels": {"app": "late"}}})
    await eventually(lambda: kube.lab.rest.get("kubePolicies"), lambda found: "deny" in str(found.body))
    await asyncio.gather(*(_wait_in_sync(kube, host) for host in hosts))
    late = await kube.pod(one, "late", app="late")
    assert await near.never_reaches(late)
    await kube.delete_pods("late")
    successor = await kube.create_pod(one, "late", {"app": "free"})
    await kube.relabel("late", app="freer")
    await asyncio.gather(*(_wait_in_sync(kube, host) for host in hosts))
    assert await near.never_reaches(late)
    assert await far.never_reaches(late)
    await late.remove()
    again = await kube.attach(one, "late", successor)
    await wait_until(lambda: near.eventually_reaches(again))
    await again.remove()
    await kube.delete_pods("late")


async def test_a_service_load_balances_and_follows_its_slices(
    kube: KubeletlessCluster, pods: tuple[Pod, Pod, Pod]
) -> None:
    """K4, and its name (W46: services were keyed without namespace, named ports unsupported)."""
    web, near, far = pods
    address = await kube.service("shop", web)
    async with answering({"web": web.place(), "near": near.place()}, port=8080):

        async def backend(client: Pod) -> str:
            try:
                return (await query(client.place(), address, 80)).responder
            except (OSError, TimeoutError):
                return ""

        for client in (far, near):
            await eventually(lambda client=client: backend(client), lambda name: name == "web")  # type: ignore[misc]
        await kube.set_backends("shop", near)
        await eventually(lambda: backend(far), lambda name: name == "near")
        name = "shop.lab.svc.cluster.local"
        assert await eventually(lambda: far.dig(name), lambda found: found == [address])
        dashed = str(web.address()).replace(".", "-")
        assert await far.dig(f"{dashed}.lab.pod.cluster.local") == [str(web.address())]
        await kube.api.delete(f"{SERVICES}/shop")
        await eventually(lambda: backend(far), lambda name: name == "")
        await eventually(lambda: far.dig(name), lambda found: found == [])


async def test_one_dns_address_serves_every_tenant(kube: KubeletlessCluster, hosts: tuple[Host, Host]) -> None:
    """The nameserver in `resolv.conf` is the netdns on the client's node, which answers for the client's tenant."""
    one, _ = hosts
    await kube.lab.tenant("green")
    await kube.lab.network("net", tenant="green", subnet="10.9.0.0/16", gateway="10.9.255.254")
    ports = [{"name": f"dns-{each}".lower(), "port": 53, "protocol": each} for each in ("UDP", "TCP")]
    metadata = {"name": "kube-dns", "labels": {"k8s-app": "kube-dns"}, "annotations": {"weft/dns": "true"}}
    made = await kube.api.create(SERVICES, {"metadata": metadata, "spec": {"ports": ports}})
    server = made["spec"]["clusterIP"]
    green = {"io__contiv__tenant": "green", "io__contiv__network": "net"}
    pods = [await kube.pod(one, "dns-default"), await kube.pod(one, "dns-green", **green)]
    await eventually(lambda: kube.lab.rest.get("kubeServices"), lambda found: "kube-dns" in str(found.body))
    await asyncio.gather(*(_wait_in_sync(kube, host) for host in hosts))
    for pod in pods:
        own, other = pod.name, next(each.name for each in pods if each is not pod)
        for question in ((own,), (own, "+tcp")):
            await eventually(
                lambda pod=pod, question=question: dig(pod.namespace, *question, server=server),  # type: ignore[misc]
                lambda found, pod=pod: found == [str(pod.address())],  # type: ignore[misc]
            )
        assert await dig(pod.namespace, other, server=server) == []
        assert await dig(pod.namespace, "kube-dns.lab.svc.cluster.local", server=server) == [server]
        await pod.remove()
    await kube.api.delete(f"{SERVICES}/kube-dns")
    await kube.delete_pods(*(pod.name for pod in pods))


async def test_a_failed_add_is_an_event_of_the_pod(kube: KubeletlessCluster, hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    uid = await kube.create_pod(one, "lost", {"io.contiv.network": "nowhere"})
    with pytest.raises(CniError, match="nowhere"):
        await kube.attach(one, "lost", uid)
    found = f"/api/v1/namespaces/lab/events?fieldSelector=involvedObject.uid={uid}"
    (event,) = await eventually(lambda: kube.api.items(found), bool)
    assert "default:nowhere does not exist" in event["message"]
    await kube.delete_pods("lost")


async def test_pods_are_deleted_and_cached_ones_added_without_the_api_server(
    kube: KubeletlessCluster, hosts: tuple[Host, Host], pods: tuple[Pod, Pod, Pod]
) -> None:
    """W46: DEL needed it (#879). An agent that starts meanwhile enforces the stored policies."""
    web, near, far = pods
    one, _ = hosts
    await kube.policy("deny", **DENY)
    await wait_until(lambda: far.never_reaches(web))
    known = await kube.create_pod(one, "known", {"app": "known"})
    await kube.create_pod(one, "deleted", {})
    deleted = await kube.attach(one, "deleted", "")
    kube.server.kill()
    try:
        came = await kube.attach(one, "known", known)
        assert await came.never_reaches(web)
        await wait_until(lambda: came.eventually_reaches(near))
        await deleted.remove()
        with pytest.raises(CniError) as refused:
            await kube.attach(one, "unknown", "1234")
        assert refused.value.code == 11
        await one.start()
        assert await far.never_reaches(web)
        assert await near.never_reaches(web)
        await came.remove()
    finally:
        await kube.server.start()
    await kube.api.delete(f"{POLICIES}/deny")
    await wait_until(lambda: far.eventually_reaches(web))
    await kube.delete_pods("known", "deleted")


async def test_nothing_is_left(kube: KubeletlessCluster) -> None:
    """Kernel, rules, attachment log and store agree that no address is taken."""
    await inventory.wait_consistent(kube.lab)
    assert list(inventory.stored(await kube.lab.rest.state())) == []
