"""The agent's REST on loopback: Contiv's routes (contiv 6.7), health, metrics, and why something was refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from weft import __version__
from weft.agent.cni.attachments import Attachments
from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.reconciler import Reconciler
from weft.agent.dns.publisher import Names
from weft.agent.metrics import Metrics
from weft.agent.observe.drops import DropLog
from weft.agent.observe.readiness import Readiness
from weft.agent.observe.rule_counters import Counts, count_rules
from weft.agent.observe.svcstats import show_uses
from weft.agent.observe.trace_api import ExplainingRest
from weft.agent.settings import AgentSettings
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.agent.store.node_ipam import NodeIpam
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import DatapathFault, WeftError
from weft.ports.datapath import Datapath, SpaceSurvey, VerdictCounters
from weft.runtime.http import MAX_BODY, Handler, error_response, errors_as_json, json_response, own_pages_only
from weft.runtime.logs import Log
from weft.runtime.routes import Route, register

log = Log("agent-rest")

# How long the kernel may take to be looked at; it may be busy with workloads.
SURVEY_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParts:
    """What the agent consists of, for those who look at it from outside."""

    settings: AgentSettings
    cluster: Cluster
    journal: AttachmentStore
    holdings: NodeIpam
    reconciler: Reconciler
    attachments: Attachments
    readiness: Readiness
    kernel: DatapathExecutor
    metrics: Metrics
    drops: DropLog
    names: Names | None
    mtu: int


class NotYet(WeftError):
    """A route that answers when the feature behind it is there."""

    code = "not-available"


class AgentRest:
    """The routes of one agent."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self._explaining = ExplainingRest(
            parts.cluster,
            journal=parts.journal,
            policies=parts.reconciler.policies,
            drops=parts.drops,
            kernel=parts.kernel,
        )

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(method="GET", path="/version", handler=self._version, about="Version of this agent"),
            Route(method="GET", path="/healthz", handler=self._healthz, about="Whether the process lives"),
            Route(method="GET", path="/readyz", handler=self._readyz, about="Whether workloads can start, or why not"),
            Route(method="GET", path="/metrics", handler=self._metrics, about="Prometheus metrics"),
            Route(method="GET", path="/inspect/driver", handler=self._driver, about="What this node has and knows"),
            Route(method="GET", path="/inspect/bgp", handler=_not_yet("BGP is not available yet"), about="BGP"),
            Route(method="GET", path="/inspect/nameserver", handler=self._nameserver, about="The names of tenants"),
            Route(method="GET", path="/svcstats", handler=self._svcstats, about="Who used which services of late"),
            Route(method="DELETE", path="/debug/reclaimEndpoint/{id}", handler=self._reclaim,
                  about="Remove an attachment of this node by its endpoint id"),
            *self._explaining.routes(),
        )  # fmt: skip

    def app(self) -> web.Application:
        app = web.Application(middlewares=[errors_as_json, own_pages_only], client_max_size=MAX_BODY)
        register(app, self.routes())
        app.on_shutdown.append(self._end_followers)
        return app

    async def _end_followers(self, _: web.Application) -> None:
        self._parts.drops.end_all()

    async def _version(self, _: web.Request) -> web.Response:
        return json_response({"Version": __version__, "GitCommit": "", "BuildTime": ""})

    async def _healthz(self, _: web.Request) -> web.Response:
        return json_response({"status": "alive"})

    async def _readyz(self, _: web.Request) -> web.Response:
        faults = self._parts.readiness.faults()
        return json_response({"ready": not faults, "reasons": faults}, status=503 if faults else 200)

    async def _metrics(self, _: web.Request) -> web.Response:
        parts, metrics = self._parts, self._parts.metrics
        stages = Counter(note.stage for note in parts.journal)
        for stage in Stage:
            metrics.attachments.labels(stage).set(stages[stage])
        silent = sum(parts.cluster.is_silent(node.name) for node in self._peers())
        metrics.peers.labels("silent").set(silent)
        metrics.peers.labels("alive").set(len(self._peers()) - silent)
        metrics.blocks.set(self._blocks())
        metrics.connected.set(parts.holdings.connected)
        metrics.ready.set(not parts.readiness.faults())
        metrics.revision.set(parts.reconciler.realised)
        metrics.lag.set(parts.reconciler.lag)
        metrics.repaired.set(parts.reconciler.repaired)
        metrics.policy.told = parts.drops.total
        try:
            async with asyncio.timeout(SURVEY_WITHIN_S):
                metrics.policy.take(self._count(await parts.kernel.call(lambda datapath: datapath.counters())))
        except (DatapathFault, TimeoutError) as error:  # the other figures are wanted all the more
            log.warning("packets not counted", reason=str(error) or "the kernel is busy")
        return web.Response(body=metrics.expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _driver(self, _: web.Request) -> web.Response:
        parts, settings, faults = self._parts, self._parts.settings, self._parts.readiness.faults()
        async with asyncio.timeout(SURVEY_WITHIN_S):
            spaces, counters = await parts.kernel.call(_look)
        return json_response(
            {
                "node": settings.host,
                "version": __version__,
                "mode": settings.mode,
                "datapath": settings.datapath,
                "ctrlIp": str(settings.ctrl_ip),
                "vtepIp": str(settings.vtep_ip),
                "vxlanPort": settings.vxlan_port,
                "mtu": parts.mtu,
                "cniSocket": str(settings.cni_socket),
                "runDir": str(settings.run_dir),
                "ready": not faults,
                "reasons": faults,
                "storeInTouch": parts.holdings.connected,
                "realisedRevision": parts.reconciler.realised,
                "lag": parts.reconciler.lag,
                "mended": parts.reconciler.repaired,
                "addressBlocks": self._blocks(),
                "names": self._tell_names(),
                "policy": self._count(counters).shortened(),
                "spaces": [_space(survey) for survey in spaces],
                "ports": [_port(note) for note in parts.journal],
                "peers": [self._peer(node) for node in self._peers()],
                "leaks": leaks(parts.journal, spaces),
            }
        )

    async def _svcstats(self, _: web.Request) -> web.Response:
        async with asyncio.timeout(SURVEY_WITHIN_S):
            uses = await self._parts.kernel.call(lambda datapath: datapath.service_uses())
        return json_response(show_uses(uses, self._parts.reconciler.services.by_tenant))

    async def _nameserver(self, _: web.Request) -> web.Response:
        names = self._parts.names
        if names is None:
            return error_response(NotYet("there are no names here: --names-socket is none"), status=501)
        return json_response(await names.inspect())

    async def _reclaim(self, request: web.Request) -> web.Response:
        key = await self._parts.attachments.reclaim(request.match_info["id"])
        return json_response({"reclaimed": str(key)})

    def _tell_names(self) -> str:
        names = self._parts.names
        if names is None:
            return "off"
        return "served" if names.follows else "away"

    def _count(self, counters: list[VerdictCounters]) -> Counts:
        return count_rules(counters, self._parts.reconciler.policies.by_tenant)

    def _peers(self) -> list[model.Node]:
        own = self._parts.settings.host
        return [node for node in self._parts.cluster.all(kinds.NODE) if node.name != own]

    def _peer(self, node: model.Node) -> dict[str, Any]:
        state = "silent" if self._parts.cluster.is_silent(node.name) else "alive"
        return {"node": node.name, "vtepIp": node.vtep_ip, "ctrlIp": node.ctrl_ip, "state": state}

    def _blocks(self) -> int:
        own = self._parts.settings.host
        return sum(
            stored.value.owner == own for blocks in self._parts.cluster.blocks.values() for stored in blocks.values()
        )


def leaks(journal: AttachmentStore, spaces: list[SpaceSurvey]) -> list[str]:
    """Where the kernel and the ledger disagree, in words. A workload that is just coming or going may show here."""
    noted = {
        (note.wiring.port.tenant, note.wiring.port.interface): note
        for note in journal
        if note.wiring is not None and note.stage is not Stage.LEAVING
    }
    found = {(space.tenant, name) for space in spaces for name in space.ports}
    lost = [(key, note) for key, note in noted.items() if key not in found and note.stage is Stage.ATTACHED]
    return [
        *(
            f"device {name} of tenant {tenant} belongs to no attachment"
            for tenant, name in sorted(found - noted.keys())
        ),
        *(f"attachment {note.endpoint.endpoint_id} has lost its device {name}" for (_, name), note in lost),
    ]


def _look(datapath: Datapath) -> tuple[list[SpaceSurvey], list[VerdictCounters]]:
    return datapath.survey(), datapath.counters()


def _space(survey: SpaceSurvey) -> dict[str, Any]:
    return {
        "tenant": survey.tenant,
        "ports": list(survey.ports),
        "devices": list(survey.devices),
        "faults": list(survey.faults),
    }


def _port(note: Attachment) -> dict[str, Any]:
    endpoint, wiring = note.endpoint, note.wiring
    return {
        "tenant": endpoint.tenant,
        "network": endpoint.network,
        "group": endpoint.group,
        "endpointID": endpoint.endpoint_id,
        "containerID": endpoint.container_id,
        "containerName": endpoint.container_name,
        "ipAddress": endpoint.ip_address,
        "ipv6Address": endpoint.ipv6_address,
        "macAddress": endpoint.mac_address,
        "interface": endpoint.interface,
        "device": wiring.port.interface if wiring else "",
        "netns": wiring.netns if wiring else "",
        "stage": note.stage,
        "published": note.published,
    }


def _not_yet(reason: str) -> Handler:
    async def refuse(_: web.Request) -> web.Response:
        return error_response(NotYet(reason), status=501)

    return refuse
