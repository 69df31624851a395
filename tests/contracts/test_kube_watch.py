"""The informers against a real kube-apiserver, with exactly the RBAC of the manifest."""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.support.kubernetes.api import Api
from tests.support.kubernetes.api_server import ApiServer
from tests.support.kubernetes.manifests import token_of
from tests.support.proxy import Proxy

from weft.adapters.kubernetes.cluster_informers import KubeInformers
from weft.adapters.kubernetes.credentials import ClientConfig
from weft.adapters.kubernetes.pods import NodePods
from weft.domain.errors import NotFound
from weft.domain.kinds import Kind
from weft.domain.model import PodPort, Value
from weft.lab.waiting import eventually, soon, until
from weft.ports.orchestrator import PodRef
from weft.runtime.tasks import background

pytestmark = pytest.mark.timeout(600)

PODS = "/api/v1/namespaces/default/pods"


def pod(name: str, *, node: str, **labels: str) -> dict[str, Any]:
    port = {"name": "http", "containerPort": 8080}
    spec = {"nodeName": node, "containers": [{"name": "c", "image": "none", "ports": [port]}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec}


@pytest.fixture
def node() -> str:
    return f"node-{uuid.uuid4().hex[:8]}"


async def client_config_of(kube: ApiServer, account: str, directory: Path) -> ClientConfig:
    """In-cluster access: a service account token in a file."""
    async with kube.client() as admin:
        (directory / "token").write_text(await token_of(admin, account))
    return ClientConfig(servers=(kube.url,), ca=kube.authority.ca, token=directory / "token")


@asynccontextmanager
async def following(client_config: ClientConfig, node: str) -> AsyncIterator[NodePods]:
    async with NodePods(client_config, node=node) as pods, background(pods.run(), name="pods"):
        await soon(pods.in_sync.wait())
        yield pods


async def delete(admin: Api, name: str) -> None:
    await admin.delete(f"{PODS}/{name}?gracePeriodSeconds=0")


def labels(pods: NodePods, name: str) -> Any:
    known = pods.cached(PodRef("default", name))
    return None if known is None else dict(known.labels)


async def test_only_the_pods_of_the_node_are_watched(kube: ApiServer, node: str, tmp_path: Path) -> None:
    """K3: labels, ports and UID; their changes; a deletion and a new pod of the same name."""
    async with (
        kube.client() as admin,
        following(await client_config_of(kube, "weft-netplugin", tmp_path), node) as pods,
    ):
        made = await admin.create(PODS, pod(f"{node}-a", node=node, app="web"))
        await admin.create(PODS, pod(f"{node}-x", node="elsewhere", app="web"))
        ref = PodRef("default", f"{node}-a", made["metadata"]["uid"])
        await until(lambda: pods.cached(ref) is not None)
        found = await pods.find(ref)
        assert (found.ref, dict(found.labels), found.ports) == (ref, {"app": "web"}, (PodPort("http", 6, 8080),))
        assert pods.cached(PodRef("default", f"{node}-x")) is None
        assert dict((await pods.find(PodRef("default", f"{node}-x"))).labels) == {
            "app": "web"
        }  # read from the API server
        await admin.patch(f"{PODS}/{node}-a", {"metadata": {"labels": {"app": "db"}}})
        await until(lambda: labels(pods, f"{node}-a") == {"app": "db"})
        await delete(admin, f"{node}-a")
        await until(lambda: labels(pods, f"{node}-a") is None)
        await admin.create(PODS, pod(f"{node}-a", node=node, app="next"))
        await until(lambda: labels(pods, f"{node}-a") == {"app": "next"})
        assert pods.cached(ref) is None
        with pytest.raises(NotFound, match="was replaced"):
            await pods.find(ref)
        assert "kubernetes.io/metadata.name" in await pods.find_namespace("default")


async def test_a_failure_is_an_event_of_the_pod(kube: ApiServer, node: str, tmp_path: Path) -> None:
    async with (
        kube.client() as admin,
        following(await client_config_of(kube, "weft-netplugin", tmp_path), node) as pods,
    ):
        made = await admin.create(PODS, pod(f"{node}-a", node=node))
        ref = PodRef("default", f"{node}-a", made["metadata"]["uid"])
        for _ in range(3):
            pods.record_event(ref, reason="FailedAttach", message="network default:none does not exist")
        field = f"involvedObject.uid={ref.uid}"
        (event,) = await eventually(
            lambda: admin.items(f"/api/v1/namespaces/default/events?fieldSelector={field}"),
            lambda found: [each["count"] for each in found] == [3],
        )
        assert (event["reason"], event["message"]) == ("FailedAttach", "network default:none does not exist")


async def test_a_restart_of_the_server_loses_nothing(kube: ApiServer, node: str, tmp_path: Path) -> None:
    async with following(await client_config_of(kube, "weft-netplugin", tmp_path), node) as pods:
        async with kube.client() as admin:
            for name in "ab":
                await admin.create(PODS, pod(f"{node}-{name}", node=node, app=name))
        await until(lambda: labels(pods, f"{node}-b") == {"app": "b"})
        kube.kill()
        await until(lambda: bool(pods.fault))
        assert labels(pods, f"{node}-a") == {"app": "a"}  # the cache is kept
        await kube.start()
        async with kube.client() as admin:
            await delete(admin, f"{node}-a")
            await admin.create(PODS, pod(f"{node}-c", node=node, app="c"))
        await until(lambda: labels(pods, f"{node}-c") == {"app": "c"})
        await until(lambda: labels(pods, f"{node}-a") is None)
        assert labels(pods, f"{node}-b") == {"app": "b"}
        await until(lambda: not pods.fault)


async def test_a_deletion_in_compacted_history_is_noticed(
    kube: ApiServer, node: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """410: while we were disconnected, etcd was compacted and the server restarted."""
    caplog.set_level(logging.INFO, logger="weft.kubernetes")
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(Proxy(int(kube.url.rpartition(":")[2])))
        client_config = await client_config_of(kube, "weft-netplugin", tmp_path)
        through = replace(client_config, servers=(f"https://127.0.0.1:{proxy.port}",))
        async with kube.client() as admin:
            for name in "ab":
                await admin.create(PODS, pod(f"{node}-{name}", node=node, app=name))
        pods = await stack.enter_async_context(following(through, node))
        assert labels(pods, f"{node}-a") == {"app": "a"}
        proxy.stall()
        await proxy.cut()
        async with kube.client() as admin:
            await delete(admin, f"{node}-a")
            for count in range(3):
                await admin.patch(f"{PODS}/{node}-b", {"metadata": {"labels": {"app": f"b{count}"}}})
            version = (await admin.get(f"{PODS}/{node}-b"))["metadata"]["resourceVersion"]
        kube.kill()
        await compact(kube, version)
        await kube.start()
        proxy.resume()
        await until(lambda: labels(pods, f"{node}-a") is None)
        await until(lambda: labels(pods, f"{node}-b") == {"app": "b2"})
    assert "resource version too old" in caplog.text


async def compact(kube: ApiServer, revision: str) -> None:
    async with aiohttp.ClientSession() as session:
        url = f"{kube.etcd.endpoints[0]}/v3/kv/compaction"
        async with session.post(url, json={"revision": revision, "physical": True}) as answer:
            assert answer.status == 200, await answer.text()


async def test_a_renewed_token_is_used(kube: ApiServer, node: str, tmp_path: Path) -> None:
    """The old one is revoked with its account, as it would expire after an hour."""
    async with kube.client() as admin:
        client_config = await client_config_of(kube, "weft-netplugin", tmp_path)
        await admin.create(PODS, pod(f"{node}-x", node="elsewhere", app="x"))
        async with following(client_config, node) as pods:
            accounts = "/api/v1/namespaces/kube-system/serviceaccounts"
            await admin.delete(f"{accounts}/weft-netplugin")
            await admin.create(accounts, {"metadata": {"name": "weft-netplugin"}})
            await client_config_of(kube, "weft-netplugin", tmp_path)
            assert dict((await pods.find(PodRef("default", f"{node}-x"))).labels) == {"app": "x"}


async def test_a_client_certificate_is_accepted(kube: ApiServer, node: str) -> None:
    user = kube.user("admin", "system:masters")
    dead = "https://127.0.0.1:1"  # an unreachable server is skipped
    client_config = ClientConfig(servers=(dead, kube.url), ca=user.ca, cert=user.cert, key=user.key)
    async with kube.client() as admin, following(client_config, node) as pods:
        await admin.create(PODS, pod(f"{node}-a", node=node, app="a"))
        await until(lambda: labels(pods, f"{node}-a") == {"app": "a"})


async def test_rbac_is_minimal(kube: ApiServer, node: str, tmp_path: Path) -> None:
    """A stolen token of a node reads no secrets and changes no pods."""
    async with kube.client() as admin:
        await admin.create(PODS, pod(f"{node}-a", node=node))
    await client_config_of(kube, "weft-netplugin", tmp_path)
    token = (tmp_path / "token").read_text()
    context = aiohttp.TCPConnector(ssl=False)
    async with aiohttp.ClientSession(
        kube.url, connector=context, headers={"Authorization": f"Bearer {token}"}
    ) as thief:
        for method, path in (
            ("GET", "/api/v1/secrets"),
            ("GET", "/api/v1/namespaces"),
            ("DELETE", f"{PODS}/{node}-a"),
            ("POST", PODS),
            ("GET", "/apis/networking.k8s.io/v1/networkpolicies"),
        ):
            async with thief.request(method, path, json={} if method == "POST" else None) as answer:
                assert answer.status == 403, f"{method} {path}"


class RecordingHandler:
    """A `ResourceHandler` that records the objects of one namespace."""

    def __init__(self) -> None:
        self.documents: dict[tuple[str, ...], Any] = {}

    def replace(self, kind: Kind[Any], documents: Sequence[Value]) -> None:
        self.documents = {key: each for key, each in self.documents.items() if key[0] != kind.name}
        for each in documents:
            self.put(kind, each)

    def put(self, kind: Kind[Any], document: Value) -> None:
        self.documents[(kind.name, *kind.key_parts(document))] = document

    def remove(self, kind: Kind[Any], document: Value) -> None:
        self.documents.pop((kind.name, *kind.key_parts(document)), None)

    def get(self, *key: str) -> Any:
        return self.documents.get(key)


async def test_cluster_informers_with_a_real_server(kube: ApiServer, node: str, tmp_path: Path) -> None:
    """W46, W47: namespaces, NetworkPolicies, Services and EndpointSlices, with the server's own defaults."""
    namespace, recorded = node, RecordingHandler()
    client_config = await client_config_of(kube, "weft-netmaster", tmp_path)
    async with (
        kube.client() as admin,
        KubeInformers(client_config) as informers,
        background(informers.run(recorded), name="informers"),
    ):
        await admin.create(
            "/api/v1/namespaces", {"metadata": {"name": namespace, "labels": {"io.contiv.tenant": "blue"}}}
        )
        await until(lambda: recorded.get("kubeNamespace", namespace) is not None)
        assert recorded.get("kubeNamespace", namespace).labels["io.contiv.tenant"] == "blue"

        policies = f"/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"
        rule = {"from": [{"namespaceSelector": {}}], "ports": [{"port": "http"}, {"port": 80, "endPort": 90}]}
        spec = {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [rule]}
        await admin.create(policies, {"metadata": {"name": "p"}, "spec": spec})
        await until(lambda: recorded.get("kubePolicy", namespace, "p") is not None)
        informers.record_policy_event(
            namespace=namespace, name="p", uid="u", reason="Realized", message="it is", warning=False
        )
        (event,) = await eventually(lambda: admin.items(f"/api/v1/namespaces/{namespace}/events"), bool)
        assert (event["involvedObject"]["kind"], event["type"], event["message"]) == (
            "NetworkPolicy",
            "Normal",
            "it is",
        )
        policy = recorded.get("kubePolicy", namespace, "p")
        assert (policy.fault, policy.spec.policy_types) == ("", ("Ingress",))
        assert policy.spec.ingress[0].ports[1].end_port == 90

        services = f"/api/v1/namespaces/{namespace}/services"
        ports = [{"name": "http", "port": 80, "targetPort": "web"}]
        made = await admin.create(services, {"metadata": {"name": "web"}, "spec": {"ports": ports}})
        await until(lambda: recorded.get("kubeService", "default", namespace, "web") is not None)
        service = recorded.get("kubeService", "default", namespace, "web")
        assert service.service.spec.cluster_ips == (made["spec"]["clusterIP"],)
        assert not service.shared
        await until(lambda: recorded.get("kubeService", "default", "default", "kubernetes") is not None)
        assert recorded.get("kubeService", "default", "default", "kubernetes").shared

        slices = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        metadata = {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}}
        endpoint = {"addresses": ["10.1.0.5"], "conditions": {"ready": True}, "nodeName": "n1"}
        document = {"metadata": metadata, "addressType": "IPv4", "endpoints": [endpoint], "ports": [{"port": 8080}]}
        await admin.create(slices, document)
        await until(lambda: recorded.get("kubeSlice", "default", namespace, "web", "web-1") is not None)

        await admin.delete(f"{policies}/p")
        await admin.delete(f"{services}/web")
        await until(lambda: recorded.get("kubePolicy", namespace, "p") is None)
        await until(lambda: recorded.get("kubeService", "default", namespace, "web") is None)
        assert informers.faults == []
