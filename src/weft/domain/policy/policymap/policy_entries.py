"""The rows of every class that stands for workloads: what becomes of a packet, by numbers.

Rows come in groups: those of a class in a direction with everyone, and those with each class that some rule tells from
everyone. A group is complete, so that nothing has to be put together from two of them. A change marks the groups that
it may concern, and `settle` judges only these again. Two workloads of other nodes never meet here, so there is no group
of two classes of which no workload is on this node: else rows would be the product of all classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from weft.domain.ids import NodeName, TenantName
from weft.domain.model import PodPort
from weft.domain.policy.engine.rule_index import Index
from weft.domain.policy.model.rules import OWN_HOST_ID, Action, Direction, FlowRule
from weft.domain.policy.policymap.delta_tracker import DeltaTracker
from weft.domain.policy.policymap.identity_classes import (
    IdentityClass,
    IdentityKind,
    OnNode,
    Term,
    remote_terms,
    speaks_of_all,
)
from weft.domain.policy.policymap.l4_partition import EVERYTHING, Outcome, Service, outcomes_of
from weft.domain.policy.policymap.policy_state import PolicyEntry
from weft.domain.policy.policymap.rules_by_peer import RulesByPeer
from weft.domain.policy.policymap.verdict_ids import Outcomes

_Side = tuple[IdentityClass, Direction]
_Group = tuple[IdentityClass, Direction, IdentityClass | None]
_Judged = tuple[tuple[Service, Outcome], ...]


class Rows:
    """See the module. `number` gives the number of a class."""

    def __init__(
        self, ledger: DeltaTracker, *, tenant: TenantName, node: NodeName, number: Callable[[IdentityClass], int]
    ) -> None:
        self._ledger, self._tenant, self._number = ledger, tenant, number
        self._own_host = OnNode(node)
        self._outcomes: Outcomes[_Group] = Outcomes(ledger, tenant=tenant)
        self._guards: dict[_Side, RulesByPeer] = {}
        self._alive: set[IdentityClass] = set()
        self._here: set[IdentityClass] = set()
        self._classes: Index[Term, IdentityClass] = Index()
        self._sides: Index[Term, _Side] = Index()
        self._remotes: Index[_Side, IdentityClass | None] = Index()
        self._judged: dict[_Group, _Judged] = {}
        self._rows: dict[_Group, list[PolicyEntry]] = {}
        self._stale: set[_Group] = set()
        self._memory: dict[tuple[frozenset[FlowRule], Direction, frozenset[PodPort]], _Judged] = {}

    @property
    def outcomes(self) -> Mapping[int, Outcome]:
        """What numbers of outcomes mean: those in rows, and the latest of those that were."""
        return self._outcomes.by_number

    def classes(self, terms: Iterable[Term]) -> set[IdentityClass]:
        """The classes that any of the terms finds."""
        return {each for term in terms for each in self._classes[term]}

    def add_class(self, new: IdentityClass) -> None:
        """Let rules find a class."""
        self._alive.add(new)
        for term in new.terms():
            self._classes.add(term, new)
        self._mark_as_remote(new)

    def remove_class(self, old: IdentityClass) -> None:
        """Forget a class and its rules."""
        self._alive.discard(old)
        self._mark_as_remote(old)
        for term in old.terms():
            self._classes.discard(term, old)
        for direction in Direction:
            side = old, direction
            guard = self._guards.pop(side, None)
            for term in guard.terms() if guard else ():
                self._sides.discard(term, side)
            self._mark_as_local(side)

    def set_here(self, each: IdentityClass, *, here: bool) -> None:
        """Say whether workloads of a class, which may be gone altogether, are on this node."""
        if here is (each in self._here):
            return
        self._here ^= {each}
        self._mark_as_remote(each)
        for direction in Direction:
            side = each, direction
            guard = self._guards.get(side)
            for term in guard.terms() if guard else ():
                self._stale |= {(*side, remote) for remote in self._classes[term]}

    def renumber(self, each: IdentityClass) -> None:
        """Write the rows of a class again, as its number is another."""
        self._mark_as_remote(each)
        for direction in Direction:
            self._mark_as_local((each, direction))

    def change_rules(self, of: IdentityClass, *, add: Iterable[FlowRule] = (), remove: Iterable[FlowRule] = ()) -> None:
        """Add and remove rules of the policies that a class is subject to."""
        for rule in remove:
            if rule.local is None or of.is_peer(rule.local):
                self._guards[of, rule.direction].discard(rule)
                self._mark_rule((of, rule.direction), rule)
        for rule in add:
            if rule.local is None or of.is_peer(rule.local):
                self._guards.setdefault((of, rule.direction), RulesByPeer()).add(rule)
                self._mark_rule((of, rule.direction), rule)

    def settle(self) -> None:
        """Judge again what was marked, and bring the rows into the ledger."""
        for group in self._stale:
            before, after = self._judged.pop(group, ()), self._judge(group)
            if after:
                self._judged[group] = after
            self._outcomes.replace(group, before, after)
        self._stale |= self._outcomes.settle()
        for group in self._stale:
            for row in self._rows.pop(group, ()):
                self._ledger.drop(row)
            self._remotes.discard(group[:2], group[2])
        for group in self._stale & self._judged.keys():
            self._rows[group] = list(self._written(group))
            for row in self._rows[group]:
                self._ledger.put(row)
            self._remotes.add(group[:2], group[2])
        self._stale.clear()
        self._memory.clear()

    def _mark_rule(self, side: _Side, rule: FlowRule) -> None:
        """Mark the groups of a side that a rule, new or gone, may concern."""
        guard = self._guards[side]
        if speaks_of_all(rule) or not guard or not self._remotes[side]:
            self._mark_as_local(side)
        for term in remote_terms(rule):
            self._stale |= {(*side, each) for each in self._classes[term]}
            if guard.has(term):
                self._sides.add(term, side)
            else:
                self._sides.discard(term, side)

    def _mark_as_local(self, side: _Side) -> None:
        """Mark all groups of a side, and those that it has as soon as it has any rule."""
        self._stale |= {(*side, each) for each in self._remotes[side]}
        self._stale.add((*side, None))
        if side[1] is Direction.INGRESS:
            self._stale |= {(*side, each) for each in self._classes[self._own_host]}

    def _mark_as_remote(self, remote: IdentityClass) -> None:
        """Mark all groups with a class."""
        for term in remote.terms():
            self._stale |= {(*side, remote) for side in self._sides[term]}
        if self._is_own_host(remote):
            self._stale |= {(*side, remote) for side in self._guards if side[1] is Direction.INGRESS}

    def _judge(self, group: _Group) -> _Judged:
        """What the rules of a side say about a class or about everyone; nothing where they need no group."""
        local, direction, remote = group
        guard = self._guards.get((local, direction))
        if not guard:
            return ()
        if remote is None:
            ports = local.ports if direction is Direction.INGRESS else frozenset[PodPort]()
            return self._judge_services(guard.rules_for_all(), ports, direction=direction)
        if remote not in self._alive or not self._may_meet(local, remote):
            return ()
        if direction is Direction.INGRESS and self._is_own_host(remote):
            return ((EVERYTHING, Outcome(OWN_HOST_ID, Action.ALLOW, direction)),)
        target = local if direction is Direction.INGRESS else remote
        rules = guard.rules_for(remote)
        return self._judge_services(rules, target.ports, direction=direction) if rules else ()

    def _may_meet(self, local: IdentityClass, remote: IdentityClass) -> bool:
        """Whether packets between two classes can come here. Who is no workload may come by this node's host."""
        return remote.standing is not IdentityKind.WORKLOAD or local in self._here or remote in self._here

    def _judge_services(
        self, rules: frozenset[FlowRule], ports: frozenset[PodPort], *, direction: Direction
    ) -> _Judged:
        """What rules say; found once for all the groups of a `settle` that have the same."""
        key = rules, direction, ports
        if key not in self._memory:
            ordered = sorted(rules, key=lambda rule: rule.order)
            self._memory[key] = tuple(outcomes_of(ordered, direction=direction, ports=ports))
        return self._memory[key]

    def _is_own_host(self, each: IdentityClass) -> bool:
        return each.standing is IdentityKind.HOST and each.node == self._own_host.node != ""

    def _written(self, group: _Group) -> Iterator[PolicyEntry]:
        local, direction, remote = group
        numbers = self._number(local), None if remote is None else self._number(remote)
        for service, outcome in self._judged[group]:
            yield PolicyEntry(self._tenant, direction, *numbers, self._outcomes[outcome], *service)
