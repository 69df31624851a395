"""The agent's REST API on loopback: Contiv's routes (contiv 6.7), health, metrics, drops and traces."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from weft import __version__
from weft.agent.cni.attachments import Attachments
from weft.agent.dataplane.desired_state import Features
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.dns_publisher import DnsPublisher
from weft.agent.metrics import Metrics
from weft.agent.observe.drops import DropLog
from weft.agent.observe.node_state import find_inconsistencies, show_netns, show_port, show_service_stats
from weft.agent.observe.readiness import Readiness
from weft.agent.observe.rule_counters import PolicyCounters, count_rules
from weft.agent.observe.trace_api import TraceApi
from weft.agent.settings import AgentSettings
from weft.agent.store.attachment_store import AttachmentStore, Stage
from weft.agent.store.node_lease import NodeLease
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import DatapathFault, WeftError
from weft.ports.datapath import Datapath, TenantNetnsReport, VerdictCounters
from weft.runtime.admission import Guard
from weft.runtime.http import MAX_BODY, Handler, error_response, errors_as_json, json_response, own_pages_only
from weft.runtime.logs import Log
from weft.runtime.routes import Route, register
from weft.runtime.store.unreadable import UnreadableKeys

log = Log("agent-rest")

# Reads wait for the datapath thread, which may be busy with ADDs for some seconds.
SURVEY_TIMEOUT_S = 10.0
# Endpoints without a block or claim that /inspect/driver lists: a hostile node can make any number.
MAX_UNCOVERED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentComponents:
    """The components of the agent that the API reads."""

    settings: AgentSettings
    cluster: Cluster
    attachment_store: AttachmentStore
    lease: NodeLease
    reconciler: Reconciler
    attachments: Attachments
    readiness: Readiness
    executor: DatapathExecutor
    metrics: Metrics
    drops: DropLog
    features: Features
    dns: DnsPublisher | None
    mtu: int
    unreadable: UnreadableKeys


class NotAvailable(WeftError):
    """The feature behind a route is not implemented, or is turned off."""

    code = "not-available"


class AgentRest:
    """The routes of one agent."""

    def __init__(self, agent: AgentComponents) -> None:
        self._agent = agent
        self._explaining = TraceApi(
            agent.cluster,
            attachment_store=agent.attachment_store,
            policies=agent.features.policies,
            drops=agent.drops,
            executor=agent.executor,
        )

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(method="GET", path="/version", handler=self._version, about="Version of this agent"),
            Route(method="GET", path="/healthz", handler=self._healthz, about="Liveness"),
            Route(method="GET", path="/readyz", handler=self._readyz, about="Readiness, with the reasons if not ready"),
            Route(method="GET", path="/metrics", handler=self._metrics, about="Prometheus metrics"),
            Route(method="GET", path="/inspect/driver", handler=self._driver, about="State of this node"),
            Route(method="GET", path="/inspect/bgp", handler=_not_available("BGP is not available yet"), about="BGP"),
            Route(method="GET", path="/inspect/nameserver", handler=self._nameserver, about="DNS records by tenant"),
            Route(method="GET", path="/svcstats", handler=self._svcstats, about="Recent service traffic by client"),
            Route(method="DELETE", path="/debug/reclaimEndpoint/{id}", handler=self._reclaim,
                  about="Remove an attachment of this node by its endpoint id"),
            *self._explaining.routes(),
        )  # fmt: skip

    def app(self, guard: Guard) -> web.Application:
        # `own_pages_only` keeps a browser on this machine from being used against the API (CSRF).
        app = web.Application(
            middlewares=[errors_as_json, guard.middleware(), own_pages_only], client_max_size=MAX_BODY
        )
        register(app, self.routes())
        app.on_shutdown.append(self._end_followers)
        return app

    async def _end_followers(self, _: web.Application) -> None:
        self._agent.drops.end_all()

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"Version": __version__, "GitCommit": "", "BuildTime": ""})

    async def _healthz(self, _: web.Request) -> web.Response:
        # Liveness only: a restart does not cure an unreachable store, so /readyz reports that.
        return json_response({"status": "alive"})

    async def _readyz(self, _: web.Request) -> web.Response:
        faults = self._agent.readiness.faults()
        return json_response({"ready": not faults, "reasons": faults}, status=503 if faults else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        agent, metrics = self._agent, self._agent.metrics
        stages = Counter(attachment.stage for attachment in agent.attachment_store)
        # Every stage, also without attachments: a series that disappears looks like missing data.
        for stage in Stage:
            metrics.attachments.labels(stage).set(stages[stage])
        peers = Counter(self._liveness(node) for node in self._peers())
        for state in ("reachable", "unreachable"):
            metrics.peers.labels(state).set(peers[state])
        metrics.blocks.set(self._blocks())
        metrics.uncovered_endpoints.set(len(agent.cluster.uncovered))
        metrics.store_connected.set(agent.lease.connected)
        metrics.ready.set(not agent.readiness.faults())
        metrics.realized_revision.set(agent.reconciler.applied_revision)
        metrics.lag.set(agent.reconciler.lag)
        if agent.dns:
            metrics.dns_in_sync.set(agent.dns.in_sync)
            metrics.dns_left_out.set(agent.dns.records_left_out)
            metrics.dns.statistics = agent.dns.statistics
        metrics.datapath.drift_repairs = agent.reconciler.repaired
        metrics.datapath.drop_events = agent.drops.total
        try:
            async with asyncio.timeout(SURVEY_TIMEOUT_S):
                counters = await agent.executor.call(lambda datapath: datapath.counters())
            metrics.datapath.update_policy(self._count(counters))
        except (DatapathFault, TimeoutError) as error:  # the other metrics are wanted all the more during a fault
            log.warning("reading packet counters failed", reason=str(error) or "the datapath thread is busy")
        return web.Response(body=metrics.expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _driver(self, _: web.Request) -> web.Response:
        agent, settings, faults = self._agent, self._agent.settings, self._agent.readiness.faults()
        # One call for both, so that counters and devices are of the same moment.
        async with asyncio.timeout(SURVEY_TIMEOUT_S):
            reports, counters = await agent.executor.call(_read_state)
        return json_response(
            {
                "node": settings.host,
                "version": __version__,
                "mode": settings.mode,
                "datapath": settings.datapath,
                "ctrlIp": str(settings.ctrl_ip),
                "vtepIp": str(settings.vtep_ip),
                "vxlanPort": settings.vxlan_port,
                "mtu": agent.mtu,
                "cniSocket": str(settings.cni_socket),
                "runDir": str(settings.run_dir),
                "ready": not faults,
                "reasons": faults,
                "storeConnected": agent.lease.connected,
                "appliedRevision": agent.reconciler.applied_revision,
                "lag": agent.reconciler.lag,
                "driftRepairs": agent.reconciler.repaired,
                "addressBlocks": self._blocks(),
                "unreadableKeys": agent.unreadable.show(),
                "uncoveredEndpoints": self._uncovered(),
                "dns": self._dns_state(),
                "policy": self._count(counters).shortened(),
                "tenantNamespaces": [show_netns(report) for report in reports],
                "ports": [show_port(attachment) for attachment in agent.attachment_store],
                "peers": [self._peer(node) for node in self._peers()],
                "inconsistencies": find_inconsistencies(agent.attachment_store, reports),
            }
        )

    async def _svcstats(self, _: web.Request) -> web.Response:
        async with asyncio.timeout(SURVEY_TIMEOUT_S):
            flows = await self._agent.executor.call(lambda datapath: datapath.service_flows())
        return json_response(show_service_stats(flows, self._agent.features.services.by_tenant))

    async def _nameserver(self, _: web.Request) -> web.Response:
        dns = self._agent.dns
        if dns is None:
            return error_response(NotAvailable("DNS is disabled on this node: --dns-socket is none"), status=501)
        return json_response(await dns.inspect())

    async def _reclaim(self, request: web.Request) -> web.Response:
        key = await self._agent.attachments.reclaim(request.match_info["id"])
        return json_response({"reclaimed": str(key)})

    def _dns_state(self) -> str:
        dns = self._agent.dns
        if dns is None:
            return "disabled"
        return "ok" if dns.in_sync else "unreachable"

    def _count(self, counters: list[VerdictCounters]) -> PolicyCounters:
        return count_rules(counters, self._agent.features.policies.by_tenant)

    def _peers(self) -> list[model.Node]:
        own = self._agent.settings.host
        return [node for node in self._agent.cluster.all(kinds.NODE) if node.name != own]

    def _peer(self, node: model.Node) -> dict[str, Any]:
        state = self._liveness(node)
        return {"node": node.name, "vtepIp": node.vtep_ip, "ctrlIp": node.ctrl_ip, "state": state}

    def _liveness(self, node: model.Node) -> str:
        # An agent sees liveness only. Whether a peer is Ready is up to netmaster, which compares sync status.
        return "unreachable" if self._agent.cluster.is_unreachable(node.name) else "reachable"

    def _uncovered(self) -> list[str]:
        """Endpoints that are ignored; the last line says how many are left out."""
        found = self._agent.cluster.uncovered
        shown = [":".join(parts) for parts in islice(found, MAX_UNCOVERED)]
        return shown + ([f"{len(found) - len(shown)} more"] if len(found) > len(shown) else [])

    def _blocks(self) -> int:
        own = self._agent.settings.host
        return sum(
            stored.value.owner == own for blocks in self._agent.cluster.blocks.values() for stored in blocks.values()
        )


def _read_state(datapath: Datapath) -> tuple[list[TenantNetnsReport], list[VerdictCounters]]:
    return datapath.inspect(), datapath.counters()


def _not_available(reason: str) -> Handler:
    async def refuse(_: web.Request) -> web.Response:
        return error_response(NotAvailable(reason), status=501)

    return refuse
