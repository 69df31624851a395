"""Policy questions on the control plane's state: would this pass and why, and what would a change allow or block."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from aiohttp import web

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Invalid, Malformed, NotFound
from weft.domain.ids import StoreKey
from weft.domain.kinds import Kind
from weft.domain.lifecycle import changes
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import CONCERNED, SHARED, follow
from weft.domain.policy.explain.diff import FlowChange, diff
from weft.domain.policy.explain.explain import Explanation, explain
from weft.domain.policy.model.protocols import parse_service
from weft.domain.store_types import Change, Listing
from weft.domain.transaction import ReadSet
from weft.master.api.objects import API, read_object
from weft.runtime.http import json_response
from weft.runtime.logs import Log
from weft.runtime.routes import Query, Route

MAX_CHANGES = 1000
# How long a difference may take; it is found on a thread of its own, from copies.
DIFF_WITHIN_S = 25.0

log = Log("policy")


class Proposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One change that is only thought of: put an object, or delete the one with a key."""

    put: str = ""
    delete: str = ""
    object: dict[str, Any] = {}
    key: str = ""


class Proposals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes thought of, in order; later ones may build on earlier ones."""

    changes: list[Proposal]


class PolicyView:
    """The cluster together with the policy engine that follows it: the sink of netmaster's mirror.

    The engine is made when it is first asked for and kept up to date from then on, so a master whom nobody asks pays
    nothing for it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._engine: Engine | None = None

    def replace(self, listing: Listing) -> None:
        self._cluster.replace(listing)
        self._engine = None

    def apply(self, change: Change) -> None:
        self._cluster.apply(change)
        if self._engine is not None:
            for event in change.events:
                _tell(self._engine, self._cluster, event.key)

    @property
    def engine(self) -> Engine:
        """The engine, as of the cluster's state."""
        if self._engine is None:
            self._engine = Engine()
            for kind in (*SHARED, *CONCERNED):
                for value in self._cluster.all(kind):
                    _tell(self._engine, self._cluster, kind.store_key(*kind.key_parts(value)))
        return self._engine


def _tell(engine: Engine, cluster: Cluster, key: StoreKey) -> None:
    """Tell the engine of an object. One that an older Weft let in and the engine cannot read has no effect."""
    try:
        follow(engine, cluster, key)
    except Invalid as error:
        log.warning("object without effect on policy", key=key, reason=error.message)


class PolicyQuestions:
    """The routes that ask the engine."""

    def __init__(self, cluster: Cluster, view: PolicyView) -> None:
        self._cluster = cluster
        self._view = view

    def routes(self) -> tuple[Route, ...]:
        text: dict[str, Any] = {"type": "string"}
        query = (
            Query(
                name="src",
                about="an endpoint (key, id, or part of its container's id or name) or an address",
                schema=text,
            ),
            Query(name="dst", about="as src", schema=text),
            Query(name="service", about="protocol and port, such as tcp/80, udp/53 or icmp", schema=text),
            Query(name="tenant", about="whose address is meant where neither end is an endpoint", schema=text),
            Query(
                name="version", about="4 or 6, where both ends have both", schema={"type": "integer", "enum": [4, 6]}
            ),
        )
        return (
            Route(method="GET", path=f"{API}/trace", handler=self.trace, query=query, answer=Explanation,
                  about="Whether a flow would pass, which rule decides, and the nearest rule that would change it"),
            Route(method="POST", path=f"{API}/policydiff", handler=self.diff, body=Proposals, answer=list[FlowChange],
                  about="What changes would newly allow or block, without making them"),
        )  # fmt: skip

    async def trace(self, request: web.Request) -> web.Response:
        query = request.query
        for name in ("src", "dst", "service"):
            if not query.get(name):
                raise Malformed(f"{name} is missing", field=name)
        version = query.get("version", "")
        if version not in {"", "4", "6"}:
            raise Malformed("version must be 4 or 6", field="version")
        protocol, port = parse_service(query["service"])
        flow = self._view.engine.directory.flow(
            self._end(query["src"], field="src"),
            self._end(query["dst"], field="dst"),
            protocol=protocol,
            port=port,
            version=int(version) if version else None,
            tenant=query.get("tenant", "default"),
        )
        return json_response(explain(self._view.engine, flow))

    def _end(self, text: str, *, field: str) -> str:
        """The engine's name of an end: the key of the one endpoint that the text fits, else the text itself."""
        found = [str(endpoint.key) for endpoint in self._cluster.find_endpoints(text)]
        exact = [key for key in found if key == text or key.endswith(f":{text}")]
        chosen = exact or found
        if len(chosen) > 1:
            raise Invalid(f"{text[:200]!r} fits {len(chosen)} endpoints, such as {chosen[0]}: write more", field=field)
        return chosen[0] if chosen else text

    async def diff(self, request: web.Request) -> web.Response:
        proposals = codec.decode_input(Proposals, await request.read())
        if not 1 <= len(proposals.changes) <= MAX_CHANGES:
            raise Invalid(f"changes must be 1 to {MAX_CHANGES}", field="changes")
        scratch, before = self._cluster.copy(), self._view.engine.copy()
        after = before.copy()
        for number, proposal in enumerate(proposals.changes):
            for key in _try_out(scratch, proposal, field=f"changes[{number}]"):
                _tell(after, scratch, key)
        async with asyncio.timeout(DIFF_WITHIN_S):
            found = await asyncio.to_thread(diff, before, after)
        return json_response(found)


def _try_out(scratch: Cluster, proposal: Proposal, *, field: str) -> list[StoreKey]:
    """Carry a proposal out on a copy, under the same rules as a real change; the keys it touched."""
    plural, way = _which(proposal, field=field)
    kind: Kind[Any] | None = kinds.BY_PLURAL.get(plural)
    if kind is None or kind not in kinds.CONFIGURABLE:
        raise NotFound(f"{field}: there are no {plural[:80]!r} to change", field=field)
    reading = ReadSet(scratch, 0)
    if way == "put":
        key = proposal.key or ":".join(str(proposal.object.get(member, "")) for member in kind.key_members())
        value: model.Value = read_object(kind, proposal.object, kind.parse_key(key))
        plan = changes.plan_put(reading, kind, value)
    else:
        plan = changes.plan_delete(reading, kind, *kind.parse_key(proposal.key))
    return scratch.carry_out(plan.writes)


def _which(proposal: Proposal, *, field: str) -> tuple[str, Literal["put", "delete"]]:
    if bool(proposal.put) == bool(proposal.delete):
        raise Invalid(f"{field}: say put (with object) or delete (with key)", field=field)
    return (proposal.put, "put") if proposal.put else (proposal.delete, "delete")
