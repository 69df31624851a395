"""The engine: the cluster's state, and for every workload the ordered rules that follow from it.

Each change is put or removed on its own and recomputes only what it touches; the result is the same as that of a new
engine fed with the final state in any order. A value that cannot be compiled raises `Invalid` and changes nothing. The
engine asks nobody and keeps no time. Use it from one task at a time; a `copy` may be changed to try something out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Self

import msgspec

from weft.domain import model
from weft.domain.ids import EndpointKey, GroupKey, NetworkKey
from weft.domain.policy.compile import contiv, kubernetes
from weft.domain.policy.compile.contiv import ContivTables, PolicyKey, RuleKey
from weft.domain.policy.engine.decide import Flow, decide, first_word, matches
from weft.domain.policy.engine.directory import Directory
from weft.domain.policy.engine.facts import Fact
from weft.domain.policy.engine.membership import Membership, Moves
from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.identities import (
    API_SERVER_KEY,
    ApiServer,
    Host,
    Identity,
    IdentityKey,
    Namespace,
    Pod,
    host_key,
    identity_of_api_server,
    identity_of_endpoint,
    identity_of_host,
    identity_of_pod,
    pod_key,
)
from weft.domain.policy.model.netpol import NetworkPolicy
from weft.domain.policy.model.rules import (
    Action,
    CompiledPolicy,
    Direction,
    FlowRule,
    MemberSet,
    RuleSet,
    UnitId,
    changed_rules,
)

_Ordered = tuple[tuple[FlowRule, ...], tuple[FlowRule, ...]]


class Affected(msgspec.Struct, frozen=True):
    """What a change altered: workloads whose rule set is another, and sets whose members or their addresses are.

    `identities` are all who came, went, or are seen in another way: by their values, or by the sets that rules name.
    `units` are the policies that came, went, or have other rules or subjects.
    """

    workloads: frozenset[IdentityKey] = frozenset()
    sets: frozenset[MemberSet] = frozenset()
    identities: frozenset[IdentityKey] = frozenset()
    units: frozenset[UnitId] = frozenset()

    def __or__(self, other: Affected) -> Affected:
        return Affected(
            self.workloads | other.workloads,
            self.sets | other.sets,
            self.identities | other.identities,
            self.units | other.units,
        )


class Verdict(msgspec.Struct, frozen=True):
    """The rule that decides at each end. A flow passes when both allow."""

    egress: FlowRule
    ingress: FlowRule

    @property
    def allowed(self) -> bool:
        return self.egress.action is Action.ALLOW and self.ingress.action is Action.ALLOW


class Engine:
    """See the module. `directory` names the ends of flows. Removing what is absent is fine (W24)."""

    def __init__(self, facts: Iterable[Fact] = ()) -> None:
        self.directory = Directory()
        self._membership = Membership()
        self._contiv = ContivTables()
        self._units: dict[UnitId, CompiledPolicy] = {}
        self._units_of_subject: Index[MemberSet, UnitId] = Index()
        self._ordered: dict[frozenset[MemberSet], _Ordered] = {}
        for fact in facts:
            self.put(fact)

    def copy(self) -> Self:
        """A twin that can be changed alone."""
        twin = type(self)()
        for name, table in vars(self).items():
            setattr(twin, name, table.copy())
        return twin

    def put(self, fact: Fact) -> Affected:
        """Add the object, or replace the one with the same key."""
        match fact:
            case Pod():
                return self._put_workload(identity_of_pod(fact))
            case model.Endpoint():
                return self._put_workload(identity_of_endpoint(fact))
            case Host():
                return self._put_bystander(identity_of_host(fact))
            case ApiServer():
                return self._put_bystander(identity_of_api_server(fact))
            case Namespace():
                return self._moved(self._membership.put_namespace(fact))
            case NetworkPolicy():
                unit = kubernetes.compile_network_policy(fact)
                return self._put_unit(unit.id, unit)
            case model.Group():
                moved = self._moved(self._membership.put_group(fact.key))
                return moved | self._recompile(self._contiv.put_group(fact))
            case model.Policy():
                return self._recompile(self._contiv.put_policy(fact))
            case model.Rule():
                return self._recompile(self._contiv.put_rule(fact))
            case model.Network():
                return self._recompile(self._contiv.put_network(fact))

    def remove_pod(self, namespace: str, name: str) -> Affected:
        return self._remove_workload(pod_key(namespace, name))

    def remove_endpoint(self, key: EndpointKey) -> Affected:
        return self._remove_workload(IdentityKey(str(key)))

    def remove_host(self, node: str) -> Affected:
        return self._remove_bystander(host_key(node))

    def remove_api_server(self) -> Affected:
        return self._remove_bystander(API_SERVER_KEY)

    def remove_namespace(self, name: str) -> Affected:
        return self._moved(self._membership.remove_namespace(name))

    def remove_network_policy(self, namespace: str, name: str) -> Affected:
        return self._put_unit(kubernetes.unit_id(namespace, name), None)

    def remove_group(self, key: GroupKey) -> Affected:
        # While its members leave, the group's policies still say whose rule sets change by it.
        moved = self._moved(self._membership.remove_group(key))
        return moved | self._recompile(self._contiv.remove_group(key))

    def remove_policy(self, key: PolicyKey) -> Affected:
        return self._recompile(self._contiv.remove_policy(key))

    def remove_rule(self, key: RuleKey) -> Affected:
        return self._recompile(self._contiv.remove_rule(key))

    def remove_network(self, key: NetworkKey) -> Affected:
        return self._recompile(self._contiv.remove_network(key))

    @property
    def workloads(self) -> Mapping[IdentityKey, Identity]:
        return self._membership.workloads

    @property
    def units(self) -> Mapping[UnitId, CompiledPolicy]:
        """Every policy that is in force or in dry run, compiled."""
        return self._units

    def members(self, of: MemberSet) -> Set[IdentityKey]:
        """The members of a set that some rule names."""
        return self._membership.members(of)

    def sets_of(self, workload: IdentityKey) -> frozenset[MemberSet]:
        """The sets, of those that rules name, which the workload is a member of."""
        return self._membership.sets_of(workload)

    def units_of(self, workload: IdentityKey) -> frozenset[UnitId]:
        """The policies that the workload is subject to."""
        return frozenset(unit for each in self.sets_of(workload) for unit in self._units_of_subject[each])

    def rule_set(self, workload: IdentityKey) -> RuleSet:
        """Everything the workload is subject to, in order of precedence, rules of dry runs included."""
        sets = self.sets_of(workload)
        if sets not in self._ordered:
            self._ordered[sets] = self._order(self.units_of(workload))
        ingress, egress = self._ordered[sets]
        return RuleSet(identity=workload, ingress=ingress, egress=egress)

    def verdict(self, flow: Flow) -> Verdict:
        """The deciding rule at each end."""
        return Verdict(egress=self.deciding(flow, Direction.EGRESS), ingress=self.deciding(flow, Direction.INGRESS))

    def deciding(self, flow: Flow, direction: Direction) -> FlowRule:
        """The rule that decides at one end."""
        if own := first_word(flow, direction):
            return own
        rules = self.rule_set(flow.ends(direction)[0].key).of(direction)
        return decide(
            (rule for rule in rules if not rule.dry_run),
            lambda rule: matches(rule, flow, self.is_member),
            direction=direction,
        )

    def is_member(self, identity: Identity, of: MemberSet) -> bool:
        return of in self._membership.sets_of(identity.key)

    def _put_bystander(self, identity: Identity) -> Affected:
        """An identity that is no workload: no set has it, no policy protects it."""
        self.directory.put(identity)
        return Affected(identities=frozenset({identity.key}))

    def _remove_bystander(self, key: IdentityKey) -> Affected:
        self.directory.remove(key)
        return Affected(identities=frozenset({key}))

    def _put_workload(self, workload: Identity) -> Affected:
        self.directory.put(workload)
        moved = self._moved(self._membership.put_workload(workload))
        return moved | Affected(identities=frozenset({workload.key}))

    def _remove_workload(self, key: IdentityKey) -> Affected:
        self.directory.remove(key)
        moved = self._moved(self._membership.remove_workload(key))
        return moved | Affected(identities=frozenset({key}))

    def _moved(self, moves: Moves) -> Affected:
        if moves:
            self._ordered.clear()  # so that combinations of sets which nobody is in any more do not pile up
        subjects = (key for key, sets in moves.items() if any(self._units_of_subject[each] for each in sets))
        return Affected(frozenset(subjects), frozenset().union(*moves.values()), frozenset(moves))

    def _recompile(self, policies: Iterable[PolicyKey]) -> Affected:
        touched = Affected()
        for key in policies:
            touched |= self._put_unit(contiv.unit_id(key), self._contiv.compile(key))
        return touched

    def _put_unit(self, key: UnitId, new: CompiledPolicy | None) -> Affected:
        old = self._units.pop(key, None)
        if new is not None:
            self._units[key] = new
        if old == new:
            return Affected()
        self._ordered.clear()
        subjects: set[IdentityKey] = set()
        seen_anew: set[IdentityKey] = set()
        gone, come = changed_rules(old, new)
        # The new sets are watched before the old ones are let go, so that a set in both keeps its members.
        for each in new.sets(come) if new else ():
            seen_anew |= self._membership.watch(each)
        for subject in old.subjects if old else ():
            subjects |= self.members(subject)
            self._units_of_subject.discard(subject, key)
        for subject in new.subjects if new else ():
            subjects |= self.members(subject)
            self._units_of_subject.add(subject, key)
        for each in old.sets(gone) if old else ():
            seen_anew |= self._membership.unwatch(each)
        return Affected(workloads=frozenset(subjects), identities=frozenset(seen_anew), units=frozenset({key}))

    def _order(self, units: frozenset[UnitId]) -> _Ordered:
        rules = sorted((rule for unit in units for rule in self._units[unit].rules), key=lambda rule: rule.order)
        return (
            tuple(rule for rule in rules if rule.direction is Direction.INGRESS),
            tuple(rule for rule in rules if rule.direction is Direction.EGRESS),
        )
