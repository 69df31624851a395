"""REST routes for debugging: dropped packets, and the policy verdict and datapath trace of a flow."""

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
from weft.agent.observe.drops import DropAttributor, DropFilter, DropLog, DropRecord, Follower
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.addresses import parse_address
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Invalid, Malformed, NotFound
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.explain.explain import Explanation, explain
from weft.domain.policy.explain.resolve import FlowResolver
from weft.domain.policy.model.identities import Identity, IdentityKey
from weft.domain.policy.model.protocols import parse_service
from weft.ports.datapath import TraceRequest
from weft.runtime.http import json_response
from weft.runtime.routes import Query, Route

# How often a follower gets an empty line while there are no drops: it shows that the connection is alive.
HEARTBEAT_S = 5.0
# How long a write to a follower may block.
STALLED_S = 10.0
_TEXT: dict[str, Any] = {"type": "string"}


class TracedEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Source or destination of a flow, with netns and device if it is an endpoint of this node."""

    identity: str
    address: str
    node: str = ""
    netns: str = ""
    device: str = ""


class TraceResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the datapath would do with the flow's first packet.

    `by` is the device that it leaves through, or the rule that drops it.
    """

    passes: bool
    by: str
    reason: str = ""


class Traced(msgspec.Struct, frozen=True, kw_only=True):
    """The policy verdict on a flow on this node, and the location of its ends."""

    tenant: str
    protocol: int
    port: int
    explanation: Explanation
    source: TracedEnd
    target: TracedEnd
    datapath: TraceResult | None = None


class TraceApi:
    """The routes. `DropLog.end_all` ends the streams."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        attachment_store: AttachmentStore,
        policies: Policies,
        drops: DropLog,
        executor: DatapathExecutor,
    ) -> None:
        self._cluster = cluster
        self._executor = executor
        self._attributor = DropAttributor(cluster, attachment_store=attachment_store, policies=policies.by_tenant)
        self._attachment_store = attachment_store
        self._policies = policies
        self._drops = drops

    def routes(self) -> tuple[Route, ...]:
        drops = (
            Query(name="tenant", about="only of this tenant", schema=_TEXT),
            Query(name="pod", about="to or from it: pod, namespace/pod, endpoint id or address", schema=_TEXT),
            Query(name="since", about="only after this time, in seconds since the epoch", schema={"type": "number"}),
            Query(name="follow", about="1: stream drops as they happen, as JSON lines", schema=_TEXT),
        )
        trace = (
            Query(name="src", about="an endpoint of this node", schema=_TEXT),
            Query(name="dst", about="an endpoint of the same tenant, or an address", schema=_TEXT),
            Query(name="service", about="protocol and port, such as tcp/80, udp/53 or icmp", schema=_TEXT),
            Query(name="version", about="4 or 6", schema={"type": "integer", "enum": [4, 6]}),
            Query(name="datapath", about="1: trace the datapath too", schema=_TEXT),
        )
        return (
            Route(method="GET", path="/drops", handler=self._list_drops, query=drops, answer=list[DropRecord],
                  about="Recent drops with their reasons"),
            Route(method="GET", path="/trace", handler=self._trace, query=trace, answer=Traced,
                  about="Policy verdict on a flow on this node"),
        )  # fmt: skip

    async def _list_drops(self, request: web.Request) -> web.StreamResponse:
        query = request.query
        matching = DropFilter(
            tenant=query.get("tenant", ""), pod=query.get("pod", ""), since=_parse_time(query.get("since", "0"))
        )
        if query.get("follow", "") in {"", "0", "false"}:
            return json_response(self._drops.recent(matching))
        with self._drops.following(matching) as follower:
            return await _stream(request, follower)

    async def _trace(self, request: web.Request) -> web.Response:
        query = request.query
        for name in ("src", "dst", "service"):
            if not query.get(name):
                raise Malformed(f"{name} is missing", field=name)
        protocol, port = parse_service(query["service"])
        version = _version(query)
        source = self._find_local(query["src"])
        policy = self._policies.by_tenant.get(source.key.tenant)
        if policy is None:
            raise NotFound(f"the policy of tenant {source.key.tenant} is not in force on this node yet")
        directory = policy.engine.directory
        here = directory.get(IdentityKey(str(source.key)))
        if here is None:
            raise NotFound(f"the policy of {source.key} is not in force on this node yet", field="src")
        target = FlowResolver(self._cluster, directory).target(
            self._find_target(query["dst"], source), tenant=source.key.tenant, service=query["service"]
        )
        flow = directory.flow_between(here, target, protocol=protocol, port=port, version=version)
        traced = Traced(
            tenant=source.key.tenant,
            protocol=flow.protocol,
            port=flow.port,
            explanation=explain(policy.engine, flow),
            source=self._end(flow.source, flow),
            target=self._end(flow.target, flow),
        )
        # Only on request: it takes time of the datapath thread, for which ADDs wait.
        if query.get("datapath", "") not in {"", "0", "false"}:
            traced = msgspec.structs.replace(traced, datapath=await self._trace_datapath(source, traced))
        return json_response(traced)

    async def _trace_datapath(self, source: Attachment, traced: Traced) -> TraceResult:
        if source.config is None or not traced.source.address or not traced.target.address:
            raise NotFound("one end of the flow has no address of this version", field="version")
        question = TraceRequest(
            port=source.config.port,
            source=parse_address(traced.source.address, field="src"),
            target=parse_address(traced.target.address, field="dst"),
            protocol=traced.protocol,
            target_port=traced.port,
        )
        answer = await self._executor.call(lambda datapath: datapath.trace(question))
        if isinstance(answer, str):
            return TraceResult(passes=True, by=answer)
        (drop,) = self._attributor.attribute([answer])
        return TraceResult(passes=False, by=drop.rule, reason=drop.reason)

    def _find_local(self, text: str) -> Attachment:
        attached = {each.key: each for each in self._attachment_store if each.stage is Stage.ATTACHED}
        found = _find_endpoint(text, (attachment.endpoint for attachment in attached.values()), field="src")
        if found is not None:
            return attached[found.key]
        remote = _find_endpoint(text, self._cluster.all(kinds.ENDPOINT), field="src")
        place = f"on {remote.host}: run the trace there" if remote is not None else "unknown"
        raise NotFound(f"{text[:200]!r} is not an endpoint of this node; it is {place}", field="src")

    def _find_target(self, text: str, source: Attachment) -> str:
        """The engine's name of an endpoint of the source's tenant, else the text itself."""
        tenant = source.key.tenant
        known = {endpoint.key: endpoint for endpoint in self._cluster.all(kinds.ENDPOINT, tenant)}
        # Attachments too: the store may not have them yet.
        known |= {each.key: each.endpoint for each in self._attachment_store if each.key.tenant == tenant}
        found = _find_endpoint(text, known.values(), field="dst")
        return str(found.key) if found is not None else text

    def _end(self, identity: Identity, flow: Flow) -> TracedEnd:
        attached = (each for each in self._attachment_store if str(each.key) == identity.key)
        config = next((attachment.config for attachment in attached if attachment.config), None)
        return TracedEnd(
            identity=identity.key,
            address=str(identity.address(flow.version) or ""),
            node=identity.node,
            netns=config.netns if config else "",
            device=config.port.interface if config else "",
        )


def _find_endpoint(text: str, endpoints: Iterable[model.Endpoint], *, field: str) -> model.Endpoint | None:
    """The endpoint with this key, id, container, pod or address; `Conflict` if there are several."""
    found = [
        each
        for each in endpoints
        if text in {str(each.key), each.endpoint_id, each.container_id, each.ip_address, each.ipv6_address}
        or text in {each.container_name, each.container_name.partition("/")[2]}
    ]
    # A container name or address may exist in several tenants.
    if len(found) > 1:
        raise Conflict(f"{text[:200]!r} may mean {' or '.join(str(each.key) for each in found[:5])}", field=field)
    return found[0] if found else None


def _version(query: Mapping[str, str]) -> int | None:
    """The IP version of the query, given as such or by an address; None when either will do."""
    version = query.get("version", "")
    if version not in {"", "4", "6"}:
        raise Malformed("version must be 4 or 6", field="version")
    if version:
        return int(version)
    for name in ("dst", "src"):
        with suppress(Invalid):
            return parse_address(query[name], field=name).family
    return None


def _parse_time(text: str) -> float:
    try:
        moment = float(text)
    except ValueError:
        moment = float("nan")
    if not isfinite(moment):
        raise Malformed("since must be a number of seconds since the epoch", field="since")
    return moment


async def _stream(request: web.Request, follower: Follower) -> web.StreamResponse:
    """Write drops as JSON lines; the last line says why the stream has ended."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
    await response.prepare(request)
    try:
        await _write(response, b"\n")  # the client sees at once that the stream is open
        while not follower.ended:
            drops = await follower.take(within=HEARTBEAT_S)
            await _write(response, b"".join(msgspec.json.encode(drop) + b"\n" for drop in drops) or b"\n")
        await _write(response, msgspec.json.encode({"ended": follower.ended}) + b"\n")
    except ConnectionError:
        pass  # the client has disconnected
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()  # close() would wait for data that the client does not read
    return response


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(STALLED_S):
        await response.write(data)
