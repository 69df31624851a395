"""Routes that say why: what was refused on this node, and what the policy in force here says about a flow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

import msgspec
from aiohttp import web

from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.policy import Policies
from weft.agent.observe.drop_attribution import DropAttributor
from weft.agent.observe.drops import DropLog, Follower, NamedDrop, Wanted
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.addresses import parse_address
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Invalid, Malformed, NotFound
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.explain.explain import Explanation, explain
from weft.domain.policy.model.identities import Identity
from weft.domain.policy.model.protocols import parse_service
from weft.ports.datapath import Question
from weft.runtime.http import json_response
from weft.runtime.routes import Query, Route

# How often a follower hears an empty line when there is nothing to tell.
HEARTBEAT_S = 5.0
# How long a follower may take to read what is under way to it.
STALLED_S = 10.0
_TEXT: dict[str, Any] = {"type": "string"}


class TracedEnd(msgspec.Struct, frozen=True, kw_only=True):
    """An end of a flow; with namespace and device when it is a workload of this node."""

    identity: str
    address: str
    node: str = ""
    netns: str = ""
    device: str = ""


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the datapath would do with the flow's first packet: by which device it leaves, or which rule refuses it."""

    passes: bool
    by: str
    why: str = ""


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy in force on this node says about a flow, and where its ends are."""

    tenant: str
    protocol: int
    port: int
    explanation: Explanation
    source: TracedEnd
    target: TracedEnd
    datapath: TraceResult | None = None


class ExplainingRest:
    """The routes; `end_all` of the drops ends those who follow."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        journal: AttachmentStore,
        policies: Policies,
        drops: DropLog,
        kernel: DatapathExecutor,
    ) -> None:
        self._cluster = cluster
        self._kernel = kernel
        self._naming = DropAttributor(cluster, journal=journal, policies=policies.by_tenant)
        self._journal = journal
        self._policies = policies
        self._drops = drops

    def routes(self) -> tuple[Route, ...]:
        drops = (
            Query(name="tenant", about="of this tenant only", schema=_TEXT),
            Query(name="pod", about="to or from it: pod, namespace/pod, endpoint id or address", schema=_TEXT),
            Query(name="since", about="not before this moment, in seconds since the epoch", schema={"type": "number"}),
            Query(name="follow", about="1: those to come, as lines of JSON, for ever", schema=_TEXT),
        )
        trace = (
            Query(name="src", about="a workload of this node", schema=_TEXT),
            Query(name="dst", about="a workload of the same tenant, or an address", schema=_TEXT),
            Query(name="service", about="protocol and port, such as tcp/80, udp/53 or icmp", schema=_TEXT),
            Query(name="version", about="4 or 6", schema={"type": "integer", "enum": [4, 6]}),
            Query(name="datapath", about="1: what the datapath would do, too", schema=_TEXT),
        )
        return (
            Route(method="GET", path="/drops", handler=self._tell_drops, query=drops, answer=list[NamedDrop],
                  about="What was refused lately, and why"),
            Route(method="GET", path="/trace", handler=self._trace, query=trace, answer=Traced,
                  about="What the policy in force on this node says about a flow"),
        )  # fmt: skip

    async def _tell_drops(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        wanted = Wanted(
            tenant=query.get("tenant", ""), pod=query.get("pod", ""), since=_moment(query.get("since", "0"))
        )
        if query.get("follow", "") in {"", "0", "false"}:
            return json_response(self._drops.recent(wanted))
        with self._drops.following(wanted) as follower:
            return await _stream(request, follower)

    async def _trace(self, request: web.Request) -> web.Response:
        query = request.query
        for name in ("src", "dst", "service"):
            if not query.get(name):
                raise Malformed(f"{name} is missing", field=name)
        protocol, port = parse_service(query["service"])
        source = self._find_local(query["src"])
        policy = self._policies.by_tenant.get(source.key.tenant)
        if policy is None:
            raise NotFound(f"the policy of tenant {source.key.tenant} is not in force on this node yet")
        flow = policy.engine.directory.flow(
            str(source.key),
            self._find_target(query["dst"], source),
            protocol=protocol,
            port=port,
            version=_version(query),
            tenant=source.key.tenant,
        )
        traced = Traced(
            tenant=source.key.tenant,
            protocol=flow.protocol,
            port=flow.port,
            explanation=explain(policy.engine, flow),
            source=self._end(flow.source, flow),
            target=self._end(flow.target, flow),
        )
        if query.get("datapath", "") not in {"", "0", "false"}:
            traced = msgspec.structs.replace(traced, datapath=await self._foretell(source, traced))
        return json_response(traced)

    async def _foretell(self, source: Attachment, traced: Traced) -> TraceResult:
        if source.wiring is None or not traced.source.address or not traced.target.address:
            raise NotFound("one end of the flow has no address of this version", field="version")
        question = Question(
            port=source.wiring.port,
            source=parse_address(traced.source.address, field="src"),
            target=parse_address(traced.target.address, field="dst"),
            protocol=traced.protocol,
            target_port=traced.port,
        )
        answer = await self._kernel.call(lambda datapath: datapath.trace(question))
        if isinstance(answer, str):
            return TraceResult(passes=True, by=answer)
        (named,) = self._naming.name([answer])
        return TraceResult(passes=False, by=named.rule, why=named.reason)

    def _find_local(self, text: str) -> Attachment:
        notes = {note.key: note for note in self._journal if note.stage is Stage.ATTACHED}
        found = _chosen(text, (note.endpoint for note in notes.values()), field="src")
        if found is not None:
            return notes[found.key]
        elsewhere = _chosen(text, self._cluster.all(kinds.ENDPOINT), field="src")
        place = f"on {elsewhere.host}: ask there" if elsewhere is not None else "not known"
        raise NotFound(f"{text[:200]!r} is no workload of this node; it is {place}", field="src")

    def _find_target(self, text: str, source: Attachment) -> str:
        """The engine's name of an endpoint of the source's tenant, else the text itself."""
        tenant = source.key.tenant
        known = {endpoint.key: endpoint for endpoint in self._cluster.all(kinds.ENDPOINT, tenant)}
        known |= {note.key: note.endpoint for note in self._journal if note.key.tenant == tenant}
        found = _chosen(text, known.values(), field="dst")
        return str(found.key) if found is not None else text

    def _end(self, identity: Identity, flow: Flow) -> TracedEnd:
        wired = next((note for note in self._journal if str(note.key) == identity.key and note.wiring), None)
        wiring = wired.wiring if wired else None
        return TracedEnd(
            identity=identity.key,
            address=str(identity.address(flow.version) or ""),
            node=identity.node,
            netns=wiring.netns if wiring else "",
            device=wiring.port.interface if wiring else "",
        )


def _chosen(text: str, endpoints: Iterable[model.Endpoint], *, field: str) -> model.Endpoint | None:
    """The endpoint that a person means: by key, id, container, pod or address; `Conflict` for several."""
    found = [
        each
        for each in endpoints
        if text in {str(each.key), each.endpoint_id, each.container_id, each.ip_address, each.ipv6_address}
        or text in {each.container_name, each.container_name.partition("/")[2]}
    ]
    if len(found) > 1:
        raise Conflict(f"{text[:200]!r} may mean {' or '.join(str(each.key) for each in found[:5])}", field=field)
    return found[0] if found else None


def _version(query: Mapping[str, str]) -> int | None:
    """The version of IP that is asked for, by itself or by an address; None when either will do."""
    version = query.get("version", "")
    if version not in {"", "4", "6"}:
        raise Malformed("version must be 4 or 6", field="version")
    if version:
        return int(version)
    for name in ("dst", "src"):
        with suppress(Invalid):
            return parse_address(query[name], field=name).family
    return None


def _moment(text: str) -> float:
    try:
        moment = float(text)
    except ValueError:
        moment = float("nan")
    if not isfinite(moment):
        raise Malformed("since must be a number of seconds since the epoch", field="since")
    return moment


async def _stream(request: web.Request, follower: Follower) -> web.StreamResponse:
    """Lines of JSON as they come; the last one says why there are no more."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    await response.prepare(request)
    try:
        await _write(response, b"\n")  # it stands
        while not follower.ended:
            drops = await follower.take(within=HEARTBEAT_S)
            await _write(response, b"".join(msgspec.json.encode(drop) + b"\n" for drop in drops) or b"\n")
        await _write(response, msgspec.json.encode({"ended": follower.ended}) + b"\n")
    except ConnectionError:
        pass  # the reader has gone
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # what is still under way to it is not waited for
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(STALLED_S):
        await response.write(data)
