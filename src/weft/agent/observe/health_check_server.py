"""Serves the `healthCheckNodePort` of services on every address of the host, as kube-proxy does."""

from __future__ import annotations

from contextlib import AsyncExitStack

from aiohttp import web

from weft.agent.dataplane.services import Services
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import Unavailable
from weft.domain.ids import NodeName
from weft.domain.loadbalancer.health import Health, health_of
from weft.runtime.admission import AdmissionMetrics, Guard, Limits
from weft.runtime.backoff import wait_event
from weft.runtime.http import errors_as_json, json_response, serving
from weft.runtime.logs import Log

log = Log("services")

# How soon a port that another process has is retried.
RETRY_S = 5.0
# For the probes of a few load balancers.
_LIMITS = Limits(connections=256, per_source=32, per_local=64, rate=50.0)
# Every address of both families.
ANY = ""


class HealthCheckServer:
    """One HTTP server per health check port."""

    def __init__(self, cluster: Cluster, services: Services, *, node: NodeName, admission: AdmissionMetrics) -> None:
        self._cluster = cluster
        self._services = services
        self._node = node
        self._admission = admission
        self._open: dict[int, AsyncExitStack] = {}
        self._health: dict[int, Health] = {}

    async def run(self) -> None:
        """Serve until cancelled, then close the ports."""
        changed = self._services.health_checks_changed
        try:
            while True:
                # Cleared before reading: a change while ports are opened leads to another round.
                changed.clear()
                if await self._reconcile():
                    await changed.wait()
                else:
                    await wait_event(changed, within=RETRY_S)
        finally:
            for port in list(self._open):
                await self._close_port(port)

    async def _reconcile(self) -> bool:
        """Open and close ports; whether exactly the desired ones are open now."""
        self._health = {
            service.service.spec.health_check_node_port: health_of(
                service,
                self._cluster.all(kinds.KUBE_SLICE, service.tenant, service.namespace, service.name),
                node=self._node,
            )
            for service in self._services.health_checked()
        }
        for port in self._open.keys() - self._health.keys():
            await self._close_port(port)
        for port in self._health.keys() - self._open.keys():
            await self._open_port(port)
        return self._open.keys() == self._health.keys()

    async def _open_port(self, port: int) -> None:
        async def answer(_: web.Request) -> web.StreamResponse:
            return self._answer(port)

        # Anybody who reaches the node may connect.
        guard = Guard("health-check", _LIMITS)
        self._admission.add(guard)
        app = web.Application(middlewares=[errors_as_json, guard.middleware()])
        # Any path: load balancers are configured with their own, and kube-proxy answers all of them.
        app.router.add_get("/{tail:.*}", answer)
        stack = AsyncExitStack()
        stack.callback(self._admission.remove, guard)
        try:
            await stack.enter_async_context(serving(app, ((ANY, port),), tls=None, guard=guard))
        except Unavailable as error:
            await stack.aclose()
            health = self._health[port]
            log.warning(
                "cannot listen on health check port", service=f"{health.namespace}/{health.name}", reason=error.message
            )
        else:
            self._open[port] = stack

    async def _close_port(self, port: int) -> None:
        await self._open.pop(port).aclose()

    def _answer(self, port: int) -> web.Response:
        health = self._health[port]
        body = {
            "service": {"namespace": health.namespace, "name": health.name},
            "localEndpoints": health.local,
            "serviceProxyHealthy": True,
        }
        return json_response(body, status=200 if health.local else 503)
