"""Health check node ports: load balancers learn whether this node has local endpoints of a service."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from tests.support.fake_cluster import FakeCluster

from weft.agent.dataplane.services import Services
from weft.agent.observe import health_check_server
from weft.agent.observe.health_check_server import HealthCheckServer
from weft.agent.store.attachment_store import AttachmentStore
from weft.domain import codec, kinds
from weft.domain.ids import DEFAULT_TENANT, NodeName, StoreKey
from weft.domain.loadbalancer.kube_objects import EndpointSlice, KubeService, KubeSlice, ServiceObject, SliceEndpoint
from weft.domain.model import Value
from weft.lab.servers.processes import free_port
from weft.lab.waiting import eventually, until
from weft.runtime.admission import AdmissionMetrics, Limits
from weft.runtime.tasks import background

KEY = (DEFAULT_TENANT, "shop", "web")


class Scene:
    """A cluster, whose services a node follows."""

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.admission = AdmissionMetrics()
        self.services = Services(self.world.cluster, node=NodeName("one"), attachment_store=AttachmentStore())

    def rejected(self) -> float:
        """The metric, for all ports of the node."""
        registry = CollectorRegistry()
        registry.register(self.admission)
        labels = {"listener": "health-check", "reason": "rate"}
        return registry.get_sample_value("weft_requests_rejected_total", labels) or 0

    def put_service(self, port: int) -> None:
        spec = {"spec": {"clusterIPs": ["10.96.0.10"], "ports": [{"port": 80}], "healthCheckNodePort": port}}
        service = msgspec.convert(spec, ServiceObject)
        document = KubeService(tenant=DEFAULT_TENANT, namespace="shop", name="web", service=service)
        self._put(kinds.KUBE_SERVICE.store_key(*KEY), document)

    def put_backend(self, node: str) -> None:
        endpoints = (SliceEndpoint(addresses=("10.1.1.5",), node_name=node),)
        value = EndpointSlice(address_type="IPv4", endpoints=endpoints)
        piece = KubeSlice(tenant=DEFAULT_TENANT, namespace="shop", service_name="web", name="web-1", slice=value)
        self._put(kinds.KUBE_SLICE.store_key(*KEY, "web-1"), piece)

    def _put(self, key: StoreKey, document: Value) -> None:
        self.world.cluster.put(key, codec.encode(document), 1)
        self.services.follow(key)

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        ports = HealthCheckServer(self.world.cluster, self.services, node=NodeName("one"), admission=self.admission)
        async with background(ports.run(), name="health ports"):
            yield


async def ask(port: int) -> tuple[int, Any]:
    """The status and the body; 0 while nothing listens."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/healthz") as answer:
            return answer.status, await answer.json()
    except aiohttp.ClientConnectionError:
        return 0, None


async def becomes(port: int, status: int) -> Any:
    return (await eventually(lambda: ask(port), lambda found: found[0] == status))[1]


async def test_the_answer_follows_the_endpoints_of_the_node() -> None:
    scene, port = Scene(), free_port()
    async with scene.answering():
        scene.put_service(port)
        assert (await becomes(port, 503))["localEndpoints"] == 0
        scene.put_backend("one")
        body = await becomes(port, 200)
        assert (body["service"], body["localEndpoints"]) == ({"namespace": "shop", "name": "web"}, 1)
        scene.put_backend("two")
        await becomes(port, 503)
    await becomes(port, 0)


async def test_ports_are_closed_with_their_services() -> None:
    scene, port, other = Scene(), free_port(), free_port()
    scene.put_service(port)
    async with scene.answering():
        await becomes(port, 503)
        scene.put_service(other)
        await becomes(other, 503)
        await becomes(port, 0)
        scene.put_service(0)
        await becomes(other, 0)


async def test_metrics_show_all_ports_together_and_do_not_decrease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check_server, "_LIMITS", Limits(rate=2.0, local_weight=1.0))
    scene, port, other = Scene(), free_port(), free_port()
    scene.put_service(port)
    async with scene.answering(), aiohttp.ClientSession() as session:
        await becomes(port, 503)
        statuses = set()
        while 429 not in statuses:
            async with session.get(f"http://127.0.0.1:{port}/page") as answer:
                statuses.add(answer.status)
        rejected = scene.rejected()
        assert rejected >= 1
        scene.put_service(other)
        await becomes(other, 503)
        await becomes(port, 0)
        assert scene.rejected() >= rejected


async def test_a_port_in_use_is_retried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(health_check_server, "RETRY_S", 0.05)
    scene, port = Scene(), free_port()
    scene.put_backend("one")
    async with scene.answering():
        with socket.create_server(("127.0.0.1", port)):
            scene.put_service(port)
            await until(lambda: "cannot listen on health check port" in caplog.text)
        await becomes(port, 200)
