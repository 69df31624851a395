"""A real API server declares, two nodes carry it out, by packets: K3, K4, W46, W47."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from tests.support import inventory
from tests.support.kubernetes.fake_cluster import POLICIES, SERVICES, PaperCluster
from tests.support.responders import answering, ask

from weft.cni.errors import CniError
from weft.lab.dig import dig
from weft.lab.hosts import Host, Pod
from weft.lab.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

DENY = {"podSelector": {"matchLabels": {"app": "web"}}, "policyTypes": ["Ingress"]}


@pytest.fixture
def hosts(kube: PaperCluster) -> tuple[Host, Host]:
    return kube.lab.hosts["one"], kube.lab.hosts["two"]


@pytest_asyncio.fixture(loop_scope="module")
async def pods(kube: PaperCluster, hosts: tuple[Host, Host]) -> AsyncIterator[tuple[Pod, Pod, Pod]]:
    """`web` and a client beside it on one host, a client on the other; all gone after the test."""
    one, two = hosts
    web = await kube.pod(one, "web", app="web")
    near = await kube.pod(one, "near", app="near")
    far = await kube.pod(two, "far", app="far")
    yield web, near, far
    for pod in (web, near, far):
        await pod.remove()
    await kube.forget("web", "near", "far")
    for policy in await kube.api.items(POLICIES):
        await kube.api.delete(f"{POLICIES}/{policy['metadata']['name']}")


async def becomes(judge: Callable[[], Awaitable[bool]]) -> None:
    """Return when it is so."""
    await eventually(judge, bool)


async def test_labels_choose_and_a_namespace_has_defaults(kube: PaperCluster, hosts: tuple[Host, Host]) -> None:
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
    await asyncio.gather(*(_knows(kube, host) for host in hosts))
    default = await kube.pod(one, "k3-default")
    assert [str(each.address()).split(".")[:2] for each in (usual, chosen, default)] == [
        ["10", "224"],
        ["10", "8"],
        ["10", "7"],
    ]
    await becomes(lambda: default.reaches(chosen))
    assert await usual.never_reaches(default)
    await kube.api.patch("/api/v1/namespaces/lab", {"metadata": {"labels": dict.fromkeys(defaults)}})
    for pod in (usual, chosen, default):
        await pod.remove()
    await kube.forget("k3-usual", "k3-chosen", "k3-default")
    await eventually(
        lambda: kube.lab.rest.get("kubeNamespaces", "lab"),
        lambda found: not found.body["labels"].keys() & defaults.keys(),
    )
    await asyncio.gather(*(_knows(kube, host) for host in hosts))


async def _knows(kube: PaperCluster, host: Host) -> None:
    """Return when the host has carried out all that the store knows."""
    (await kube.lab.rest.put("tenants", tenantName=f"mark-{host.name}")).accepted()
    answer = await kube.lab.rest.send("DELETE", f"/api/v1/tenants/mark-{host.name}/?wait=60")
    answer.accepted()


async def test_policies_come_into_force_and_follow_labels(kube: PaperCluster, pods: tuple[Pod, Pod, Pod]) -> None:
    """W47: NetworkPolicy was a stub. On the same node and from another; by pods, by namespaces, by named ports."""
    web, near, far = pods
    await becomes(lambda: near.reaches(web))
    await becomes(lambda: far.reaches(web))
    await kube.policy("deny", **DENY)
    await becomes(lambda: near.never_reaches(web))
    await becomes(lambda: far.never_reaches(web))
    friends = {"podSelector": {"matchLabels": {"friend": "yes"}}}
    await kube.policy("allow", **DENY, ingress=[{"from": [friends], "ports": [{"port": "http"}]}])
    await kube.relabel("far", friend="yes")
    await becomes(lambda: far.reaches(web))
    assert await far.never_reaches(web, port=81)
    assert await near.never_reaches(web)
    await kube.relabel("far", friend=None)
    await becomes(lambda: far.never_reaches(web))
    everyone = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "lab"}}}
    await kube.policy("all", **DENY, ingress=[{"from": [everyone]}])
    await becomes(lambda: near.reaches(web, port=81))
    for name in ("deny", "allow", "all"):
        await kube.api.delete(f"{POLICIES}/{name}")
    await kube.relabel("web", app="none")
    await becomes(lambda: far.reaches(web))


async def test_who_declares_a_policy_hears_what_has_become_of_it(
    kube: PaperCluster, hosts: tuple[Host, Host], pods: tuple[Pod, Pod, Pod]
) -> None:
    """Events beside the policy: in force on both nodes, not on one that is away, and then after all."""
    web, near, _ = pods
    _, two = hosts
    await kube.policy("early", **DENY)
    assert await _told(kube, "early", "InForce") == "in force on 2 nodes"
    assert await near.never_reaches(web)
    two.kill()
    await kube.policy("late", **DENY)
    assert "two" in await _told(kube, "late", "NotInForce")
    await two.start()
    assert await _told(kube, "late", "InForce") == "in force on 2 nodes"


async def _told(kube: PaperCluster, policy: str, reason: str) -> str:
    """The message of the event with a reason that is told of a policy."""
    about = f"involvedObject.kind=NetworkPolicy,involvedObject.name={policy},reason={reason}"
    path = f"/api/v1/namespaces/lab/events?fieldSelector={about}"
    (told,) = await eventually(lambda: kube.api.items(path), bool)
    message: str = told["message"]
    return message


async def test_a_pod_is_born_under_its_policy_and_kept_under_it_until_it_is_gone(
    kube: PaperCluster, hosts: tuple[Host, Host], pods: tuple[Pod, Pod, Pod]
) -> None:
    """A pod whose object is gone, or another's by now, is enforced as long as it can speak."""
    _, near, far = pods
    one, _ = hosts
    await kube.policy("deny", **{**DENY, "podSelector": {"matchLabels": {"app": "late"}}})
    await eventually(lambda: kube.lab.rest.get("kubePolicies"), lambda found: "deny" in str(found.body))
    await asyncio.gather(*(_knows(kube, host) for host in hosts))
    late = await kube.pod(one, "late", app="late")
    assert await near.never_reaches(late)
    await kube.forget("late")
    successor = await kube.declare(one, "late", {"app": "free"})
    await kube.relabel("late", app="freer")
    await asyncio.gather(*(_knows(kube, host) for host in hosts))
    assert await near.never_reaches(late)
    assert await far.never_reaches(late)
    await late.remove()
    again = await kube.attach(one, "late", successor)
    await becomes(lambda: near.reaches(again))
    await again.remove()
    await kube.forget("late")


async def test_a_service_balances_follows_its_slices_and_goes(kube: PaperCluster, pods: tuple[Pod, Pod, Pod]) -> None:
    """K4, and its name (W46: services were keyed without namespace, named ports unsupported)."""
    web, near, far = pods
    address = await kube.service("shop", web)
    async with answering({"web": web.place(), "near": near.place()}, port=8080):

        async def heard(client: Pod) -> str:
            try:
                return (await ask(client.place(), address, 80)).who
            except (OSError, TimeoutError):
                return ""

        for client in (far, near):
            await eventually(lambda client=client: heard(client), lambda who: who == "web")  # type: ignore[misc]
        await kube.serve_by("shop", near)
        await eventually(lambda: heard(far), lambda who: who == "near")
        name = "shop.lab.svc.cluster.local"
        assert await eventually(lambda: far.dig(name), lambda found: found == [address])
        dashed = str(web.address()).replace(".", "-")
        assert await far.dig(f"{dashed}.lab.pod.cluster.local") == [str(web.address())]
        await kube.api.delete(f"{SERVICES}/shop")
        await eventually(lambda: heard(far), lambda who: who == "")
        await eventually(lambda: far.dig(name), lambda found: found == [])


async def test_one_address_answers_names_in_every_tenant(kube: PaperCluster, hosts: tuple[Host, Host]) -> None:
    """What a kubelet writes into `resolv.conf` leads to the netdns of whoever asks, which knows its own tenant."""
    one, _ = hosts
    await kube.lab.tenant("green")
    await kube.lab.network("net", tenant="green", subnet="10.9.0.0/16", gateway="10.9.255.254")
    ports = [{"name": f"dns-{each}".lower(), "port": 53, "protocol": each} for each in ("UDP", "TCP")]
    metadata = {"name": "kube-dns", "labels": {"k8s-app": "kube-dns"}, "annotations": {"weft/names": "true"}}
    made = await kube.api.create(SERVICES, {"metadata": metadata, "spec": {"ports": ports}})
    server = made["spec"]["clusterIP"]
    green = {"io__contiv__tenant": "green", "io__contiv__network": "net"}
    pods = [await kube.pod(one, "dns-default"), await kube.pod(one, "dns-green", **green)]
    await eventually(lambda: kube.lab.rest.get("kubeServices"), lambda found: "kube-dns" in str(found.body))
    await asyncio.gather(*(_knows(kube, host) for host in hosts))
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
    await kube.forget(*(pod.name for pod in pods))


async def test_what_went_wrong_is_told_beside_the_pod(kube: PaperCluster, hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    uid = await kube.declare(one, "lost", {"io.contiv.network": "nowhere"})
    with pytest.raises(CniError, match="nowhere"):
        await kube.attach(one, "lost", uid)
    found = f"/api/v1/namespaces/lab/events?fieldSelector=involvedObject.uid={uid}"
    (told,) = await eventually(lambda: kube.api.items(found), bool)
    assert "default:nowhere does not exist" in told["message"]
    await kube.forget("lost")


async def test_without_the_api_server_pods_go_and_known_ones_come(
    kube: PaperCluster, hosts: tuple[Host, Host], pods: tuple[Pod, Pod, Pod]
) -> None:
    """W46: DEL needed it (#879). An agent that starts meanwhile enforces what was declared."""
    web, near, far = pods
    one, _ = hosts
    await kube.policy("deny", **DENY)
    await becomes(lambda: far.never_reaches(web))
    known = await kube.declare(one, "known", {"app": "known"})
    await kube.declare(one, "gone", {})
    gone = await kube.attach(one, "gone", "")
    kube.server.kill()
    try:
        came = await kube.attach(one, "known", known)
        assert await came.never_reaches(web)
        await becomes(lambda: came.reaches(near))
        await gone.remove()
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
    await becomes(lambda: far.reaches(web))
    await kube.forget("known", "gone")


async def test_nothing_is_left(kube: PaperCluster) -> None:
    """Kernel, rules, ledger and store agree that no address is taken."""
    await inventory.settled(kube.lab)
    assert list(inventory.stored(await kube.lab.rest.state())) == []
