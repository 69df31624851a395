"""Mode kubernetes on a fake datapath: identity comes from the API server, attachments outlive it (K3, W46)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.support.fake_cluster import group, network
from tests.support.fake_datapath import FakeNode, fake_node
from tests.support.kube_script import Scripted, listing, pod, scripted_server

from weft.adapters.kubernetes import pods as pods_module
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.objects import Pod
from weft.adapters.kubernetes.pods import NodePods
from weft.agent.cni.pods import LabelSync
from weft.domain import kinds, model
from weft.domain.desired.placement import GROUP_LABEL, NETWORK_LABEL, TENANT_LABEL
from weft.domain.errors import Invalid, NotFound, Unavailable
from weft.domain.ids import TenantName
from weft.domain.model import PodIdentity, PodPort
from weft.domain.policy.compile.kube_objects import KubeNamespace
from weft.domain.transaction import put
from weft.lab.waiting import soon, until
from weft.runtime.tasks import background

PATH = "/api/v1/pods"
BLUE = TenantName("blue")
ALSO = (
    model.Tenant(name=BLUE),
    network("usual", "10.2.0.0/16", tenant=BLUE),
    network("web-net", "10.3.0.0/16", tenant=BLUE),
    group("web", tenant=BLUE, network="web-net"),
)


class Scene:
    """A node, the API server that has its pods, and their cache."""

    def __init__(self, node: FakeNode, server: Scripted, pods: NodePods) -> None:
        self.node = node
        self.server = server
        self.pods = pods

    def endpoint(self, container: str) -> model.Endpoint:
        return next(each for each in self.node.cluster.all(kinds.ENDPOINT) if each.container_id == container)

    async def add(self, container: str, *, uid: str = "") -> model.Endpoint:
        await self.node.call("ADD", container, uid=uid or f"uid-{container}")
        await until(lambda: any(each.container_id == container for each in self.node.cluster.all(kinds.ENDPOINT)))
        return self.endpoint(container)


def label_sync(here: Scene) -> LabelSync:
    node = here.node
    return LabelSync(
        cluster=node.cluster,
        pods=here.pods,
        attachment_store=node.attachment_store,
        publisher=node.store_side.publisher,
    )


def fake_pod(name: str, version: int = 1, *, labels: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    return pod(name, version, namespace="paper", metadata={"labels": labels or {}}, **spec)


@asynccontextmanager
async def scene(*pods: dict[str, Any], namespace: dict[str, str] | None = None) -> AsyncIterator[Scene]:
    """With `namespace` labels the namespace `paper` is in the store; without, only the API server has it."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(scripted_server())
        server.lists[PATH] = [listing(5, *pods)]
        server.objects["/api/v1/namespaces/paper"] = {"metadata": {"name": "paper"}}
        known = await stack.enter_async_context(NodePods(ClientConfig(servers=(server.url,)), node="one"))
        node = await stack.enter_async_context(fake_node(pods=known, also=ALSO))
        if namespace is not None:
            document = KubeNamespace(name="paper", labels=namespace)
            await node.store.commit([], [put(kinds.KUBE_NAMESPACE, document)])
            await until(lambda: node.cluster.get(kinds.KUBE_NAMESPACE, "paper") is not None)
        await stack.enter_async_context(background(known.run(), name="pods"))
        await soon(known.in_sync.wait())
        yield Scene(node, server, known)


async def test_pod_labels_override_those_of_the_namespace() -> None:
    """K3."""
    pods = (
        fake_pod("a"),
        fake_pod("b", labels={GROUP_LABEL: "web", "app": "b"}),
        fake_pod("c", labels={TENANT_LABEL: "default"}),
    )
    async with scene(*pods, namespace={TENANT_LABEL: "blue", NETWORK_LABEL: "usual"}) as here:
        placed = [await here.add(name) for name in "abc"]
    assert [(each.tenant, each.network, each.group) for each in placed] == [
        ("blue", "usual", ""),
        ("blue", "web-net", "web"),
        ("default", "default-net", ""),
    ]
    assert placed[1].labels == {GROUP_LABEL: "web", "app": "b"}


async def test_an_endpoint_carries_the_identity_of_its_pod() -> None:
    """What policies need: the namespace, and the names of ports."""
    ports = [{"name": "http", "containerPort": 8080}]
    async with scene(fake_pod("a", containers=[{"name": "c", "ports": ports}])) as here:
        made = await here.add("a")
    assert made.pod == PodIdentity(namespace="paper", name="a", uid="uid-a", ports=(PodPort("http", 6, 8080),))
    assert made.container_name == "paper/a"


async def test_an_add_for_a_replaced_pod_is_refused_and_leaves_nothing() -> None:
    async with scene(fake_pod("a")) as here:
        here.server.objects["/api/v1/namespaces/paper/pods/a"] = fake_pod("a")
        with pytest.raises(NotFound, match="was replaced"):
            await here.node.call("ADD", "a", uid="uid-before")
        assert (here.node.datapath.plugged, list(here.node.attachment_store)) == ({}, [])


async def test_a_failed_add_is_recorded_as_an_event_on_the_pod() -> None:
    """`kubectl describe` shows what went wrong."""
    async with scene(fake_pod("a", labels={NETWORK_LABEL: "none"})) as here:
        with pytest.raises(Invalid, match="network default:none does not exist"):
            await here.node.call("ADD", "a", uid="uid-a")
        await until(lambda: bool(here.server.posted))
        ((_, path, event),) = here.server.posted
        assert path == "/api/v1/namespaces/paper/events"
        assert event["involvedObject"]["uid"] == "uid-a"
        assert event["message"] == "network default:none does not exist"
        await here.node.call("DEL", "a", uid="uid-a")
        assert len(here.server.posted) == 1


@pytest.mark.parametrize(
    ("labels", "namespace", "message"),
    [
        ({"io.contiv.tennant": "blue"}, {}, "label 'io.contiv.tennant' is unknown: did you mean io.contiv.tenant?"),
        ({}, {"io.contiv.tennant": "blue"}, "label 'io.contiv.tennant' is unknown: did you mean io.contiv.tenant?"),
        ({TENANT_LABEL: "nosuch"}, {}, "tenant 'nosuch' does not exist"),
        ({TENANT_LABEL: ""}, {}, "label io.contiv.tenant is empty: give a name or remove it"),
    ],
)
async def test_UX5_a_pod_with_a_misspelt_label_does_not_start_and_gets_an_event(
    labels: dict[str, str], namespace: dict[str, str], message: str
) -> None:
    async with scene(fake_pod("a", labels=labels), namespace=namespace) as here:
        with pytest.raises(Invalid):
            await here.node.call("ADD", "a", uid="uid-a")
        await until(lambda: bool(here.server.posted))
        ((_, _, event),) = here.server.posted
        assert event["message"].startswith(message)
        assert (here.node.datapath.plugged, list(here.node.attachment_store)) == ({}, [])
        await here.node.call("DEL", "a", uid="uid-a")


async def test_without_the_api_server_cached_pods_start_and_all_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """W46: DEL needed the API server (#879)."""
    monkeypatch.setattr(pods_module, "GET_TIMEOUT_S", 0.3)
    async with scene(fake_pod("a"), fake_pod("b"), namespace={}) as here:
        await here.add("a")
        here.server.accepts = lambda _: False
        here.server.lists.clear()
        await here.add("b")
        with pytest.raises(Unavailable):
            await here.node.call("ADD", "c", uid="uid-c")
        for name in "abc":
            await here.node.call("DEL", name)
        assert (here.node.datapath.plugged, list(here.node.attachment_store)) == ({}, [])


async def test_label_changes_of_a_pod_reach_the_store_and_the_record() -> None:
    async with scene(fake_pod("a", labels={"app": "web"}), namespace={}) as here:
        made = await here.add("a")
        node = here.node
        async with background(label_sync(here).run(), name="labels"):
            here.pods.put(_as_pod(fake_pod("a", 9, labels={"app": "db"})))
            await until(lambda: here.endpoint("a").labels == {"app": "db"})
            await until(lambda: [attachment.endpoint.labels for attachment in node.attachment_store] == [{"app": "db"}])
        assert here.endpoint("a").ip_address == made.ip_address


async def test_a_successor_of_the_same_name_does_not_relabel_its_predecessor() -> None:
    """Enforcement is kept until the pod is gone: its successor has other labels, and another UID."""
    async with scene(fake_pod("a", labels={"app": "web"}), namespace={}) as here:
        await here.add("a")
        successor = fake_pod("a", 9, labels={"app": "db"})
        successor["metadata"]["uid"] = "uid-next"
        here.pods.put(_as_pod(successor))
        await label_sync(here).sync()
        here.pods.remove(_as_pod(successor))
        await label_sync(here).sync()
        assert here.endpoint("a").labels == {"app": "web"}


async def test_labels_of_the_network_configuration_are_binding() -> None:
    async with scene(fake_pod("a", labels={TENANT_LABEL: "blue"}), namespace={}) as here:
        with pytest.raises(Invalid, match="by the network configuration"):
            await here.node.call("ADD", "a", b',"labels":{"io.contiv.tenant":"default"}', uid="uid-a")


def _as_pod(document: dict[str, Any]) -> Pod:
    return msgspec.convert(document, Pod)
