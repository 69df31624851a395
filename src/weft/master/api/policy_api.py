"""Policy queries on the control plane's state: trace a flow, and diff the verdicts of proposed changes."""

from __future__ import annotations

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
from weft.domain.policy.engine.engine_sync import SHARED_KINDS, TENANT_KINDS, keys_to_sync, sync_object
from weft.domain.policy.explain.diff import FlowChange
from weft.domain.policy.explain.explain import Explanation, explain
from weft.domain.policy.explain.resolve import FlowResolver, TraceQuery
from weft.domain.store_types import Change, Listing
from weft.domain.transaction import ReadSet
from weft.master.api.guarded_writes import compute_diff
from weft.master.api.objects import API, read_object
from weft.runtime.http import json_response
from weft.runtime.logs import Log
from weft.runtime.routes import Query, Route

# Bounds the time of one diff request; proposals are applied on the event loop.
MAX_CHANGES = 1000

log = Log("policy")


class Proposal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One proposed change: put an object, or delete the one with a key."""

    put: str = ""
    delete: str = ""
    object: dict[str, Any] = {}
    key: str = ""


class Proposals(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Proposed changes, in order; later ones may depend on earlier ones."""

    changes: list[Proposal]


class PolicyView:
    """The cluster and a policy engine in sync with it: the sink of netmaster's mirror.

    The engine is built on first use and kept up to date from then on. A master without policy queries has no engine.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._engine: Engine | None = None

    def replace(self, listing: Listing) -> None:
        self._cluster.replace(listing)
        # Rebuilt on next use: a full listing has no events to apply.
        self._engine = None

    def apply(self, change: Change) -> None:
        self._cluster.apply(change)
        if self._engine is not None:
            for event in change.events:
                _sync_object(self._engine, self._cluster, event.key)

    @property
    def engine(self) -> Engine:
        """The engine, in sync with the cluster."""
        if self._engine is None:
            self._engine = Engine()
            for kind in (*SHARED_KINDS, *TENANT_KINDS):
                for key in keys_to_sync(self._cluster, kind):
                    _sync_object(self._engine, self._cluster, key)
        return self._engine


def _sync_object(engine: Engine, cluster: Cluster, key: StoreKey) -> None:
    """Sync one object to the engine. An invalid one, which an older Weft has accepted, is ignored."""
    try:
        sync_object(engine, cluster, key)
    except Invalid as error:
        log.warning("ignoring invalid object", key=key, reason=error.message)


class PolicyApi:
    """The policy query routes."""

    def __init__(self, cluster: Cluster, view: PolicyView) -> None:
        self._cluster = cluster
        self._view = view

    def routes(self) -> tuple[Route, ...]:
        text: dict[str, Any] = {"type": "string"}
        query = (
            Query(
                name="src",
                about="source: an endpoint (key, id, or part of its container's id or name) or an address",
                schema=text,
            ),
            Query(name="dst", about="destination, as src", schema=text),
            Query(name="service", about="protocol and port, such as tcp/80, udp/53 or icmp", schema=text),
            Query(name="tenant", about="tenant of the addresses, if several tenants have them", schema=text),
            Query(
                name="version", about="IP version, if src and dst have both", schema={"type": "integer", "enum": [4, 6]}
            ),
        )
        return (
            Route(method="GET", path=f"{API}/trace", handler=self.trace, query=query, answer=Explanation,
                  about="Trace a flow: its verdict, the deciding rule, and the nearest rule that would change it"),
            Route(method="POST", path=f"{API}/policydiff", handler=self.diff, body=Proposals, answer=list[FlowChange],
                  about="What proposed changes would newly allow or deny, without making them"),
        )  # fmt: skip

    async def trace(self, request: web.Request) -> web.Response:
        query = request.query
        for name in ("src", "dst", "service"):
            if not query.get(name):
                raise Malformed(f"{name} is missing", field=name)
        version = query.get("version", "")
        if version not in {"", "4", "6"}:
            raise Malformed("version must be 4 or 6", field="version")
        engine = self._view.engine
        flow = FlowResolver(self._cluster, engine.directory).flow(
            TraceQuery(
                source=query["src"],
                target=query["dst"],
                service=query["service"],
                tenant=query.get("tenant", ""),
                version=int(version) if version else None,
            )
        )
        return json_response(explain(engine, flow))

    async def diff(self, request: web.Request) -> web.Response:
        proposals = codec.decode_input(Proposals, await request.read())
        if not 1 <= len(proposals.changes) <= MAX_CHANGES:
            raise Invalid(f"changes must be 1 to {MAX_CHANGES}", field="changes")
        # Copies: the mirror keeps changing the originals while the diff runs.
        scratch, before = self._cluster.copy(), self._view.engine.copy()
        after = before.copy()
        for number, proposal in enumerate(proposals.changes):
            for key in _apply_to_copy(scratch, proposal, field=f"changes[{number}]"):
                _sync_object(after, scratch, key)
        return json_response(await compute_diff(before, after))


def _apply_to_copy(scratch: Cluster, proposal: Proposal, *, field: str) -> list[StoreKey]:
    """Apply a proposal to a copy, with the same validation as a real change; the keys that changed."""
    plural, operation = _operation(proposal, field=field)
    kind: Kind[Any] | None = kinds.BY_PLURAL.get(plural)
    if kind is None or kind not in kinds.CONFIGURABLE:
        raise NotFound(f"{field}: {plural[:80]!r} is not a kind of object that can be changed", field=field)
    reading = ReadSet(scratch, 0)  # the revision is not used: nothing is committed
    if operation == "put":
        key = proposal.key or ":".join(str(proposal.object.get(member, "")) for member in kind.key_members())
        value: model.Value = read_object(kind, proposal.object, kind.parse_key(key))
        plan = changes.plan_put(reading, kind, value)
    else:
        plan = changes.plan_delete(reading, kind, *kind.parse_key(proposal.key))
    return scratch.carry_out(plan.writes)


def _operation(proposal: Proposal, *, field: str) -> tuple[str, Literal["put", "delete"]]:
    if bool(proposal.put) == bool(proposal.delete):
        raise Invalid(f"{field}: give either put (with object) or delete (with key)", field=field)
    return (proposal.put, "put") if proposal.put else (proposal.delete, "delete")
