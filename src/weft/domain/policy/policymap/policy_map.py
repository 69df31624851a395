"""The engine's answers for one tenant as lookup tables (`weft.domain.policy.policymap.policy_state`), kept up to date change by change.

Whoever changes the engine notes what was touched; `refresh` then says what a datapath has to put and to drop. The
parts follow from the engine's state alone, never from the way to it. A node's tables differ from another's only in
what is about its own host, in which workloads' classes are told apart from each other, as one of two must be on the
node, and, for a tenant without policies, in whose workloads are there at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from weft.domain.addresses import Address, Range
from weft.domain.desired.diff import Difference
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.engine import Affected, Engine
from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.identities import IdentityKey
from weft.domain.policy.model.ranges import address_set
from weft.domain.policy.model.rules import (
    DEFAULT_ALLOW_ID,
    Action,
    CompiledPolicy,
    Direction,
    FlowRule,
    MemberSet,
    UnitId,
    changed_rules,
)
from weft.domain.policy.policymap.delta_tracker import DeltaTracker
from weft.domain.policy.policymap.identity_classes import FLAGS, IdentityClass, IdentityKind
from weft.domain.policy.policymap.ip_identity import IpIdentityMap, Place
from weft.domain.policy.policymap.l4_partition import Outcome
from weft.domain.policy.policymap.lookup import Lookup
from weft.domain.policy.policymap.policy_entries import Rows
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyPart
from weft.domain.policy.policymap.stable_ids import StableIds


class _Change(NamedTuple):
    """A policy as it was and as it is, with the rules that went and came."""

    old: CompiledPolicy
    new: CompiledPolicy
    gone: set[FlowRule]
    come: set[FlowRule]


# A policy that does not exist.
_NOTHING = CompiledPolicy(id=UnitId(""), subjects=(), rules=())


class PolicyMap:
    """See the module. The engine has this tenant's facts, and hosts and API servers."""

    def __init__(self, engine: Engine, *, tenant: TenantName, node: NodeName) -> None:
        self._engine, self._tenant = engine, tenant
        self._ledger = DeltaTracker()
        self._places = IpIdentityMap(engine, tenant=tenant, node=node)
        self._numbers: StableIds[IdentityClass] = StableIds()
        self._rows = Rows(self._ledger, tenant=tenant, node=node, number=self._number)
        self._units: dict[UnitId, CompiledPolicy] = {}
        self._units_of_subject: Index[MemberSet, UnitId] = Index()
        self._at: dict[Place, IpIdentity | CidrIdentity] = {}
        self._lookup: Lookup | None = None
        self._identities_noted: set[IdentityKey] = set(engine.directory)
        self._units_noted: set[UnitId] = set(engine.units)

    @property
    def parts(self) -> Set[PolicyPart]:
        """Everything a datapath should have, as of the last `refresh`."""
        return self._ledger.parts

    @property
    def outcomes(self) -> Mapping[int, Outcome]:
        """What numbers of outcomes mean: those in force, and the latest of those that were."""
        return self._rows.outcomes

    def note(self, touched: Affected) -> None:
        """Remember what a change of the engine touched, for the next `refresh`."""
        self._identities_noted |= touched.identities
        self._units_noted |= touched.units

    def set_ground(self, subnets: Iterable[Range], gateways: Iterable[Address]) -> None:
        """Say what the tenant's networks are: who has an address there and is not known is a stranger."""
        holes = [Range(each.family, each.number, each.number) for each in gateways]
        self._places.set_ground(address_set(subnets, without=holes))

    def refresh(self) -> Difference[PolicyPart]:
        """What is to be put and dropped since the last call, in a fixed order. A put may replace what is dropped."""
        changes = [self._take_unit(key) for key in self._units_noted]
        self._units_noted.clear()
        self._places.set_guarded(bool(self._units))
        for identity in self._identities_noted:
            self._places.touch(identity)
        self._identities_noted.clear()
        self._places.settle()
        born = self._take_classes()
        for change in changes:
            self._bring(change, without=born)
        self._rows.settle()
        self._lookup = None
        return self._ledger.take()

    def lookup(self, source: Address, target: Address, *, protocol: int, port: int = 0) -> tuple[Outcome, Outcome]:
        """What the parts say about a flow at its source (egress) and its target (ingress)."""
        if self._lookup is None:
            self._lookup = Lookup(self.parts)
        lookup, outcomes = self._lookup, self.outcomes
        numbers = lookup.number(source), lookup.number(target)

        def judged(direction: Direction) -> Outcome:
            number = lookup.outcome(*numbers, direction=direction, protocol=protocol, port=port)
            return outcomes[number] if number is not None else Outcome(DEFAULT_ALLOW_ID, Action.ALLOW, direction)

        return judged(Direction.EGRESS), judged(Direction.INGRESS)

    def _take_unit(self, key: UnitId) -> _Change:
        """Take over a policy, and what its rules tell apart."""
        old, new = self._units.pop(key, _NOTHING), self._engine.units.get(key, _NOTHING)
        if new is not _NOTHING:
            self._units[key] = new
        change = _Change(old, new, *changed_rules(old, new))
        self._places.use(change.come)
        self._places.disuse(change.gone)
        for subject in old.subjects:
            self._units_of_subject.discard(subject, key)
        for subject in new.subjects:
            self._units_of_subject.add(subject, key)
        return change

    def _take_classes(self) -> set[IdentityClass]:
        """Number the classes that came up, forget those that are nowhere, and write who is where."""
        places = set(self._places.changed)
        met = {each for each in self._places.changed.values() if each is not None}
        met |= {each for each in map(self._places.get, places) if each is not None}
        self._places.changed.clear()
        dead = {each for each in met if each in self._numbers and not self._places[each]}
        born = {each for each in met if each not in self._numbers and self._places[each]}
        for each in dead:
            self._numbers.remove(each)
            self._rows.remove_class(each)
        for each in born:
            self._numbers.add(each, each.text())
            self._rows.add_class(each)
        for each in self._numbers.moved:
            self._rows.renumber(each)
            places |= self._places[each]
        self._numbers.moved.clear()
        for each in born:
            if each.standing is IdentityKind.WORKLOAD:
                self._rows.change_rules(each, add=self._rules_of(each))
        for each in self._places.moved:
            self._rows.set_here(each, here=self._places.is_here(each))
        self._places.moved.clear()
        for place in places:
            self._write(place)
        return born

    def _write(self, place: Place) -> None:
        if old := self._at.pop(place, None):
            self._ledger.drop(old)
        held = self._places.get(place)
        if held is None:
            return
        if isinstance(place, Address):
            self._at[place] = IpIdentity(self._tenant, place, self._number(held))
        else:
            self._at[place] = CidrIdentity(self._tenant, place, self._number(held))
        self._ledger.put(self._at[place])

    def _bring(self, change: _Change, *, without: Set[IdentityClass]) -> None:
        """Bring a changed policy to the classes that are subject to it, but those that were given all their rules."""
        were = self._rows.classes(change.old.subjects) - without
        are = self._rows.classes(change.new.subjects) - without
        for each in were & are:
            self._rows.change_rules(each, add=change.come, remove=change.gone)
        for each in were - are:
            self._rows.change_rules(each, remove=change.old.rules)
        for each in are - were:
            self._rows.change_rules(each, add=change.new.rules)

    def _rules_of(self, each: IdentityClass) -> Iterable[FlowRule]:
        units = {unit for of in each.sets for unit in self._units_of_subject[of]}
        return (rule for unit in units for rule in self._units[unit].rules)

    def _number(self, of: IdentityClass) -> int:
        return self._numbers[of] | FLAGS.get(of.standing, 0)
