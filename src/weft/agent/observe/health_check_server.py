"""Answers load balancers at the `healthCheckNodePort` of services, on every address of the host, as kube-proxy does."""

from __future__ import annotations

from contextlib import AsyncExitStack

from aiohttp import web

from weft.agent.dataplane.services import Services
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Unavailable
from weft.domain.ids import NodeName
from weft.domain.loadbalancer.health import Health, health_of
from weft.runtime.backoff import wait_event
from weft.runtime.http import json_response, serving
from weft.runtime.logs import Log

log = Log("services")

# After how long a port that somebody else has is tried again.
AGAIN_S = 5.0
# Every address of both families.
ANY = ""


class HealthPorts:
    """The ports that are open, and what is answered there."""

    def __init__(self, cluster: Cluster, services: Services, *, node: NodeName) -> None:
        self._cluster = cluster
        self._services = services
        self._node = node
        self._open: dict[int, AsyncExitStack] = {}
        self._health: dict[int, Health] = {}

    async def run(self) -> None:
        """Answer for ever; the ports are closed when it is cancelled."""
        news = self._services.probes_changed
        try:
            while True:
                news.clear()
                if await self._look():
                    await news.wait()
                else:
                    await wait_event(news, within=AGAIN_S)
        finally:
            for port in list(self._open):
                await self._close(port)

    async def _look(self) -> bool:
        """Open and close what has to be; whether all is as it should be."""
        self._health = {
            service.service.spec.health_check_node_port: health_of(
                service,
                self._cluster.all(kinds.KUBE_SLICE, service.tenant, service.namespace, service.name),
                node=self._node,
            )
            for service in self._services.probed()
        }
        for port in self._open.keys() - self._health.keys():
            await self._close(port)
        for port in self._health.keys() - self._open.keys():
            await self._try_open(port)
        return self._open.keys() == self._health.keys()

    async def _try_open(self, port: int) -> None:
        async def answer(_: web.Request) -> web.StreamResponse:
            return self._answer(port)

        app = web.Application()
        app.router.add_get("/{tail:.*}", answer)
        stack = AsyncExitStack()
        try:
            await stack.enter_async_context(serving(app, ((ANY, port),), tls=None))
        except Unavailable as error:
            found = self._health[port]
            log.warning("health port not opened", service=f"{found.namespace}/{found.name}", reason=error.message)
        else:
            self._open[port] = stack

    async def _close(self, port: int) -> None:
        await self._open.pop(port).aclose()

    def _answer(self, port: int) -> web.Response:
        found = self._health[port]
        body = {
            "service": {"namespace": found.namespace, "name": found.name},
            "localEndpoints": found.local,
            "serviceProxyHealthy": True,
        }
        return json_response(body, status=200 if found.local else 503)
