"""Writes that say what they change, and that may be tried out or refused if they newly allow traffic.

The effect of a write on policy is computed before its commit, on copies of the engine and off the event loop. The
commit compares every group, policy, rule and network of the tenant, so that no concurrent write can turn a change
that opened nothing into one that does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, OpensTraffic, Unavailable
from weft.domain.ids import TenantName
from weft.domain.kinds import Kind
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.diff import FlowChange, diff
from weft.domain.policy.explain.opening import describe_opening, engines_of, opened_ranges
from weft.domain.store_types import Put
from weft.domain.transaction import ReadSet, Transaction
from weft.master.control.control import ControlPlane
from weft.runtime.routes import Query, is_set

_BOOLEAN: dict[str, Any] = {"type": "boolean"}
GUARD_QUERY = (
    Query(name="dry-run", about="write nothing; answer what the write would change", schema=_BOOLEAN),
    Query(
        name="refuse-opening",
        about="refuse to change or delete an object with 409 `opens-traffic` if that newly allows traffic",
        schema=_BOOLEAN,
    ),
    Query(name="report", about="answer what the write has changed, instead of the object", schema=_BOOLEAN),
)

# Verdicts depend on these kinds of a tenant's objects, endpoints aside.
POLICY_KINDS: tuple[Kind[Any], ...] = (kinds.NETWORK, kinds.GROUP, kinds.POLICY, kinds.RULE)
# How long the effect of a write may take to compute. After that the guard fails closed.
DIFF_TIMEOUT_S = 25.0
# Threads of their own: a thread cannot be stopped at the deadline, and those of asyncio resolve names too.
_DIFF_THREADS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="weft-policy-diff")
# How often a write is evaluated again because policies have changed meanwhile.
_ATTEMPTS = 10
# How many changes of verdicts, and lines about them, an answer contains.
_MAX_VERDICTS = 200
_MAX_LINES = 20

Outcome = Literal["created", "changed", "unchanged", "deleted"]


class MemberChange(msgspec.Struct, frozen=True, kw_only=True):
    """A member of an object before and after; null if absent."""

    member: str
    before: Any = None
    after: Any = None


class WriteReport(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a write changes: the object, verdicts of policy, and in `opens` what it newly allows, line by line."""

    key: str
    outcome: Outcome
    changes: tuple[MemberChange, ...] = ()
    verdicts: tuple[FlowChange, ...] = ()
    opens: tuple[str, ...] = ()
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How to write: only try, refuse what opens traffic, answer with a report."""

    dry_run: bool = False
    refuse_opening: bool = False
    report: bool = False

    @property
    def needs_effect(self) -> bool:
        return self.dry_run or self.refuse_opening or self.report


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWrite:
    """A write of one object before its commit. `wanted` is None for a deletion, `present` for a creation."""

    kind: Kind[Any]
    key: tuple[str, ...]
    present: model.Value | None
    transaction: Transaction

    @property
    def wanted(self) -> model.Value | None:
        """The object after the write."""
        own = self.kind.store_key(*self.key)
        for write in self.transaction.writes:
            if getattr(write, "key", None) == own:
                return codec.decode(self.kind.type, write.value) if isinstance(write, Put) else None
        return self.present

    @property
    def tenant(self) -> TenantName:
        return TenantName(self.key[0])

    @property
    def outcome(self) -> Outcome:
        if not self.transaction.writes:
            return "unchanged"
        if self.wanted is None:
            return "deleted"
        return "created" if self.present is None else "changed"


Planner = Callable[[ReadSet], PlannedWrite]


@dataclass(frozen=True, slots=True)
class _Effect:
    """The effect of a write on policy. The fingerprint identifies the state in which it was computed."""

    verdicts: tuple[FlowChange, ...] = ()
    opens: tuple[str, ...] = ()
    fingerprint: object = None


class _StateMoved(Exception):
    """Policies have changed since the effect of a write was computed."""


class GuardedWrites:
    """Evaluates and commits writes."""

    def __init__(self, control: ControlPlane, engine: Callable[[], Awaitable[Engine]]) -> None:
        self._control = control
        self._engine = engine

    @property
    def _cluster(self) -> Cluster:
        return self._control.cluster

    async def write(self, plan: Planner, options: WriteOptions) -> WriteReport:
        """Commit a write and return its report; with `dry_run` only the report, `OpensTraffic` if that is refused."""
        for _ in range(_ATTEMPTS):
            planned, engine = self._planned(plan), None
            if self._needs_engine(planned):
                engine = await self._engine()
                # Again, and no await until the effect is computed: plan, engine and fingerprint are of one state.
                planned = self._planned(plan)
            effect = await self._effect(planned, engine)
            report = _report(planned, effect, dry_run=options.dry_run)
            # Creating an object is no accident; changing one that exists may be, also if it cannot be read.
            exists = self._cluster.exists(planned.kind, *planned.key)
            if options.refuse_opening and exists and effect.opens:
                raise _refusal(report)
            if options.dry_run:
                return report
            try:
                await self._control.carry_out(lambda reading: self._checked(plan, reading, planned, effect))  # noqa: B023
            except _StateMoved:
                continue
            return report
        raise Unavailable("policies of the tenant change all the time: try again")

    def _planned(self, plan: Planner) -> PlannedWrite:
        return plan(ReadSet(self._cluster, self._control.mirror.revision))

    def _needs_engine(self, planned: PlannedWrite) -> bool:
        """Whether a write may change verdicts."""
        if planned.kind not in POLICY_KINDS or not planned.transaction.writes:
            return False
        # Without a rule every verdict is the default one, unless garbage denies something. Most writes that set up a
        # tenant end here.
        if planned.kind is kinds.RULE or self._cluster.faults:
            return True
        return any(parts[0] == planned.tenant for parts in self._cluster.tables["rules"])

    def _checked(self, plan: Planner, reading: ReadSet, evaluated: PlannedWrite, effect: _Effect) -> Transaction:
        """The transaction, if its effect is still the one that was computed."""
        if effect.fingerprint is not None:
            # Compared at the commit too: another netmaster or an agent may write between this plan and its commit.
            for kind in POLICY_KINDS:
                reading.compare_prefix(kind.store_prefix(evaluated.tenant))
            if self._fingerprint(evaluated.tenant) != effect.fingerprint:
                raise _StateMoved
        planned = plan(reading)
        if (planned.present, planned.wanted) != (evaluated.present, evaluated.wanted):
            raise _StateMoved
        return planned.transaction

    async def _effect(self, planned: PlannedWrite, engine: Engine | None) -> _Effect:
        if isinstance(planned.present, model.Tenant) or planned.kind is kinds.TENANT:
            return _Effect(opens=tuple(opened_ranges(_tenant(planned.present), _tenant(planned.wanted))))
        if planned.kind not in POLICY_KINDS or not planned.transaction.writes:
            return _Effect()
        tenant = planned.tenant
        fingerprint = self._fingerprint(tenant)
        if engine is None:
            return _Effect(fingerprint=fingerprint)
        before, after = engines_of(engine, self._cluster, planned.transaction.writes, tenant=tenant)
        verdicts = await compute_diff(lambda: diff(before, after))
        opens = tuple(describe_opening(change) for change in verdicts if change.allowed)
        return _Effect(verdicts, opens, fingerprint)

    def _fingerprint(self, tenant: str) -> object:
        """What the verdicts of a tenant depend on, by revision: equal while nothing of it is written or deleted."""
        return tuple(
            frozenset(
                (parts, stored.revision)
                for parts, stored in self._cluster.tables[kind.prefix].items()
                if parts[0] == tenant
            )
            for kind in POLICY_KINDS
        )


async def compute_diff(work: Callable[[], tuple[FlowChange, ...]]) -> tuple[FlowChange, ...]:
    """Compute the verdicts that differ off the event loop; `Unavailable` if that takes too long.

    The engines must be copies: the mirror keeps changing the original.
    """
    try:
        async with asyncio.timeout(DIFF_TIMEOUT_S):
            return await asyncio.get_running_loop().run_in_executor(_DIFF_THREADS, work)
    except TimeoutError as error:
        raise Unavailable(
            f"cannot tell within {DIFF_TIMEOUT_S:g} s what this change would allow: use a smaller one"
        ) from error


def read_write_options(query: Mapping[str, str]) -> WriteOptions:
    """The options of a write's query, or `Malformed`."""
    return WriteOptions(
        dry_run=is_set(query, "dry-run"),
        refuse_opening=is_set(query, "refuse-opening"),
        report=is_set(query, "report"),
    )


def _tenant(value: model.Value | None) -> model.Tenant | None:
    return value if isinstance(value, model.Tenant) else None


def _report(planned: PlannedWrite, effect: _Effect, *, dry_run: bool) -> WriteReport:
    opens = effect.opens
    if len(opens) > _MAX_LINES:
        opens = (*opens[:_MAX_LINES], f"and {len(opens) - _MAX_LINES} more")
    return WriteReport(
        key=":".join(planned.key),
        outcome=planned.outcome,
        changes=_member_changes(planned),
        verdicts=effect.verdicts[:_MAX_VERDICTS],
        opens=opens,
        dry_run=dry_run,
    )


def _member_changes(planned: PlannedWrite) -> tuple[MemberChange, ...]:
    if planned.present is None or planned.wanted is None:
        return ()
    before, after = codec.members(planned.present), codec.members(planned.wanted)
    return tuple(
        MemberChange(member=member, before=before.get(member), after=after.get(member))
        for member in planned.wanted.__struct_encode_fields__
        if before.get(member) != after.get(member)
    )


def _refusal(report: WriteReport) -> Conflict:
    return OpensTraffic(
        f"{report.key} exists, and this change would newly allow traffic: {'; '.join(report.opens[:5])}. "
        "Nothing was changed",
        details={"opens": list(report.opens), "verdicts": msgspec.to_builtins(report.verdicts[:100])},
    )
