"""Policy queries on the control plane's state: trace a flow, and diff the verdicts of proposed changes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal, TypeGuard

import msgspec
from aiohttp import web

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Invalid, Malformed, NotFound, Unavailable
from weft.domain.ids import StoreKey
from weft.domain.kinds import Kind
from weft.domain.lifecycle import changes
from weft.domain.policy.compile.limits import QUICK_SIZE, size_of
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import SHARED_KINDS, TENANT_KINDS, keys_to_sync, sync_object
from weft.domain.policy.explain.diff import FlowChange, diff
from weft.domain.policy.explain.explain import Explanation, explain
from weft.domain.policy.explain.resolve import FlowResolver, TraceQuery
from weft.domain.store_keys import ObjectKey, ParsedKey, parse_store_key
from weft.domain.store_types import Change, Listing
from weft.domain.transaction import ReadSet
from weft.master.api.guarded_writes import compute_diff
from weft.master.api.objects import API, read_object
from weft.runtime.http import json_response
from weft.runtime.logs import Log
from weft.runtime.routes import Query, Route

# Bounds the time of one diff request.
MAX_CHANGES = 1000
ENGINE_TIMEOUT_S = 25.0
# More changed objects than the first are taken up on a thread; with more than the second, the engine is built again.
INLINE_CHANGES, MAX_CHANGED = 200, 10_000

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

    The engine is built on first use. Later changes are noted, and taken up at the next use. What may take long is done
    on a thread, which owns the engine until it has ended. A master without policy queries has no engine.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._engine: Engine | None = None
        # The objects that have changed since the engine was in sync.
        self._changed: dict[StoreKey, None] = {}
        self._syncing: asyncio.Task[None] | None = None
        # A new listing makes the engine worthless, also one that a thread has now.
        self._listings = 0

    def replace(self, listing: Listing) -> None:
        self._cluster.replace(listing)
        # Rebuilt on next use: a full listing has no events to apply.
        self._listings += 1
        self._forget_engine()

    def apply(self, change: Change) -> None:
        self._cluster.apply(change)
        if self._engine is None and self._syncing is None:
            return
        self._changed.update((event.key, None) for event in change.events)
        # Endpoints that blocks and claims of this change have covered or uncovered.
        self._changed.update((key, None) for key in self._cluster.cover_changed)
        if len(self._changed) > MAX_CHANGED and self._syncing is None:
            self._forget_engine()  # nobody has asked for a long time

    def _forget_engine(self) -> None:
        self._engine = None
        self._changed.clear()

    async def engine(self) -> Engine:
        """The engine. It is in sync with the cluster, and not changed, until the caller awaits something.

        `Unavailable` when it takes too long, because policies near their bound change all the time.
        """
        try:
            async with asyncio.timeout(ENGINE_TIMEOUT_S):
                return await self._synced_engine()
        except TimeoutError as error:
            raise Unavailable(f"policies are not computed within {ENGINE_TIMEOUT_S:g} s: try again") from error

    async def _synced_engine(self) -> Engine:
        while True:
            if self._syncing is None and self._engine is not None and self._is_quick():
                _sync_objects(self._engine, self._cluster, self._changed)
                self._changed.clear()
                return self._engine
            syncing = self._syncing = self._syncing or asyncio.create_task(self._sync(), name="policy engine")
            # A caller that is cancelled leaves the thread its engine.
            await asyncio.wait([syncing])
            syncing.result()

    def _is_quick(self) -> bool:
        if len(self._changed) > INLINE_CHANGES:
            return False
        policies = (parsed for parsed in map(parse_store_key, self._changed) if _is_network_policy(parsed))
        stored = (self._cluster.get(kinds.KUBE_POLICY, *parsed.parts) for parsed in policies)
        return sum(size_of(each.value.spec) for each in stored if each is not None) <= QUICK_SIZE

    async def _sync(self) -> None:
        listings, engine, keys = self._listings, self._engine, tuple(self._changed)
        if engine is None:
            engine = Engine()
            keys = tuple(key for kind in (*SHARED_KINDS, *TENANT_KINDS) for key in keys_to_sync(self._cluster, kind))
        self._changed.clear()
        # Without an engine if the thread fails: nobody knows how far it came.
        self._engine = None
        try:
            await asyncio.to_thread(_sync_objects, engine, self._cluster, keys)
            if self._listings == listings:
                self._engine = engine
        finally:
            self._syncing = None


def _is_network_policy(parsed: ParsedKey) -> TypeGuard[ObjectKey]:
    return isinstance(parsed, ObjectKey) and parsed.kind is kinds.KUBE_POLICY


def _sync_objects(engine: Engine, cluster: Cluster, keys: Iterable[StoreKey]) -> None:
    for key in keys:
        _sync_object(engine, cluster, key)


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
        engine = await self._view.engine()
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
        engine = await self._view.engine()
        # Copies: the mirror keeps changing the originals while the diff runs.
        scratch, before = self._cluster.copy(), engine.copy()
        return json_response(await compute_diff(lambda: _diff_of(proposals, scratch, before)))


def _diff_of(proposals: Proposals, scratch: Cluster, before: Engine) -> tuple[FlowChange, ...]:
    """Apply proposals to a copy of the cluster, and compare the verdicts before and after."""
    after = before.copy()
    for number, proposal in enumerate(proposals.changes):
        for key in _apply_to_copy(scratch, proposal, field=f"changes[{number}]"):
            _sync_object(after, scratch, key)
    return diff(before, after)


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
