"""Information routes (contiv 2.5): version, leader, health, readiness, metrics, and services in Contiv's form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from weft import __version__
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import NotFound
from weft.domain.oper import endpoint_oper
from weft.domain.services import providers
from weft.master.metrics import Metrics
from weft.runtime.http import json_response
from weft.runtime.routes import Route


class InfoApi:
    """The information routes of one netmaster."""

    def __init__(
        self,
        cluster: Cluster,
        metrics: Metrics,
        *,
        own_address: str,
        faults: Callable[[], Awaitable[list[str]]],
        unreadable: Callable[[], list[str]],
    ) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._own = own_address
        self._faults = faults
        self._unreadable = unreadable

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(method="GET", path="/version", handler=self.version, about="Version of this netmaster",
                  answer=dict[str, str], local=True),
            Route(method="GET", path="/info", handler=self.info, about="The leader, and all masters and nodes",
                  answer=dict[str, Any], local=True),
            Route(method="GET", path="/healthz", handler=self.healthz, about="Liveness of the process",
                  answer=dict[str, str], local=True, open=True),  # kubelets probe without a token
            Route(method="GET", path="/readyz", handler=self.readyz, about="Readiness to serve requests, with reasons",
                  answer=dict[str, Any], local=True, open=True),
            Route(method="GET", path="/metrics", handler=self.metrics, about="Prometheus metrics", answer=None,
                  local=True),
            Route(method="GET", path="/services", handler=self.services, about="All services with their providers",
                  answer=list[dict[str, Any]]),
            Route(method="GET", path="/service/{id}", handler=self.service, about="One service, by name:tenant",
                  answer=dict[str, Any]),
        )  # fmt: skip

    async def version(self, _: web.Request) -> web.Response:
        # GitCommit and BuildTime are members of Contiv's response that its clients expect.
        return json_response({"Version": __version__, "GitCommit": "", "BuildTime": ""})

    async def info(self, _: web.Request) -> web.Response:
        leader = self._cluster.leader[0] if self._cluster.leader else ""
        return json_response(
            {
                "local-ip": self._own,
                "leader-ip": leader,
                # By the mirror, as on every master: all of them agree on one leader.
                "current-state": "leader" if leader == self._own else "follower",
                "netplugin-nodes": sorted(self._cluster.alive["nodes"]),
                "netmaster-nodes": sorted(self._cluster.alive["masters"]),
            }
        )

    async def healthz(self, _: web.Request) -> web.Response:
        return json_response({"status": "alive"})

    async def readyz(self, _: web.Request) -> web.Response:
        faults = await self._faults()
        body = {"ready": not faults, "reasons": faults, "unreadable": self._unreadable()}
        return json_response(body, status=503 if faults else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.expose(self._cluster), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def services(self, _: web.Request) -> web.Response:
        return json_response([self._service(service) for service in self._cluster.all(kinds.SERVICE)])

    async def service(self, request: web.Request) -> web.Response:
        name, _, tenant = request.match_info["id"].partition(":")
        stored = self._cluster.get(kinds.SERVICE, tenant, name)
        if stored is None:
            raise NotFound(f"service {request.match_info['id'][:200]!r} does not exist: the id is name:tenant")
        return json_response(self._service(stored.value))

    def _service(self, service: model.Service) -> dict[str, Any]:
        """A service in Contiv's form (contiv 4.3)."""
        provider_map = {
            f"{endpoint.ip_address}:{endpoint.tenant}": endpoint_oper(self._cluster, endpoint)
            for endpoint in providers(self._cluster, service)
        }
        return {
            "id": f"{service.name}:{service.tenant}",
            "servicename": service.name,
            "tenantname": service.tenant,
            "subnet": service.network,
            "ports": service.ports,
            "selectors": dict(pair.split("=", 1) for pair in service.selectors),
            "ipaddress": service.vip,
            "ipv6address": service.ipv6_vip,
            "providers": provider_map,
        }
