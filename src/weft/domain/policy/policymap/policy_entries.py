"""The policy entries of every workload class, updated incrementally.

Entries come in groups: one group per class and direction for any remote identity, and one for each remote class that
some rule distinguishes. A group is complete, so a lookup never combines two groups. A change marks the groups that it
may affect, and `update_entries` evaluates only these again. Packets between two workloads on other nodes never pass
this node, so two classes without a workload here have no group. Otherwise the entries would be the product of all
classes.
"""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from weft.domain.ids import NodeName, TenantName
from weft.domain.model import PodPort
from weft.domain.policy.model.multimap import Multimap
from weft.domain.policy.model.rules import OWN_HOST_ID, Action, Direction, FlowRule, Peer
from weft.domain.policy.policymap.delta_tracker import DeltaTracker
from weft.domain.policy.policymap.identity_classes import (
    IdentityClass,
    IdentityKind,
    NodeHost,
    Term,
    matches_any_peer,
    remote_terms,
)
from weft.domain.policy.policymap.l4_partition import (
    ANY_L4,
    MAX_MASKED_RULES,
    L4Verdicts,
    RuleTable,
    Verdict,
    l4_verdicts,
)
from weft.domain.policy.policymap.policy_state import VERDICT_DENY, PolicyEntry, VerdictCounter
from weft.domain.policy.policymap.stable_ids import StableIds

# How many retired verdict ids stay resolvable: the drop log may report a drop after its rule is gone.
_MAX_RETIRED = 1024

# A class with the direction of its own rules.
_Side = tuple[IdentityClass, Direction]
# A side with a remote class; None stands for any remote identity.
_Group = tuple[IdentityClass, Direction, IdentityClass | None]
# Rules, their direction, and the named ports of the destination.
_Evaluation = tuple[frozenset[FlowRule], Direction, frozenset[PodPort]]

# A group with more rules than this, and this part of all rules of its side, is evaluated by bit masks.
_MASKED_RULES, _MASKED_PART = 16, 8


class RulesByPeer:
    """The rules of one class in one direction, by peer. Adding twice and discarding an absent rule change nothing."""

    def __init__(self) -> None:
        self._all: set[FlowRule] = set()
        self._any_peer: set[FlowRule] = set()
        # Rules that match every class with a term, and rules of which some peer has the term and a further condition.
        self._by_term: Multimap[Term, FlowRule] = Multimap()
        self._by_condition: Multimap[Term, tuple[FlowRule, Peer]] = Multimap()

    def add(self, rule: FlowRule) -> None:
        self._all.add(rule)
        if matches_any_peer(rule):
            self._any_peer.add(rule)
        for term, condition in remote_terms(rule):
            if condition is None:
                self._by_term.add(term, rule)
            else:
                self._by_condition.add(term, (rule, condition))

    def discard(self, rule: FlowRule) -> None:
        self._all.discard(rule)
        self._any_peer.discard(rule)
        for term, condition in remote_terms(rule):
            if condition is None:
                self._by_term.discard(term, rule)
            else:
                self._by_condition.discard(term, (rule, condition))

    def terms(self) -> Iterator[Term]:
        """Iterate over the terms of the remote classes that some rule distinguishes."""
        yield from self._by_term
        yield from self._by_condition

    def has_term(self, term: Term) -> bool:
        return bool(self._by_term[term] or self._by_condition[term])

    def __len__(self) -> int:
        return len(self._all)

    def all_rules(self) -> frozenset[FlowRule]:
        return frozenset(self._all)

    def rules_for_any(self) -> frozenset[FlowRule]:
        """Return the rules for any peer."""
        return frozenset(self._any_peer)

    def rules_for(self, remote: IdentityClass) -> frozenset[FlowRule]:
        """Return all rules for a remote class; nothing if no rule distinguishes it."""
        specific = self._by_term.union(remote.terms())
        if self._by_condition:
            # The peers of a rule may be thousands, so only those with a term of the class are tried.
            candidates = self._by_condition.union(remote.terms())
            specific.update(rule for rule, peer in candidates if remote.is_peer(peer))
        return frozenset(self._any_peer | specific) if specific else frozenset()


class VerdictIds:
    """An id and a counter for every verdict in use."""

    def __init__(self, delta: DeltaTracker, *, tenant: TenantName) -> None:
        self._delta, self._tenant = delta, tenant
        self._ids: StableIds[Verdict] = StableIds()
        # How many groups use each verdict.
        self._uses: Counter[Verdict] = Counter()
        self._counters: dict[Verdict, VerdictCounter] = {}
        self._touched: set[Verdict] = set()
        self._current: dict[int, Verdict] = {}
        self._retired: dict[int, Verdict] = {}

    def __getitem__(self, verdict: Verdict) -> int:
        return self._ids[verdict] | (VERDICT_DENY if verdict.action is Action.DENY else 0)

    @property
    def by_id(self) -> Mapping[int, Verdict]:
        """The verdict of each id, current or recently retired."""
        # A chain, not a merged copy: this is read for every logged drop.
        return ChainMap(self._current, self._retired)

    def replace(self, before: L4Verdicts, after: L4Verdicts) -> None:
        """Record which verdicts a group of entries used and uses now."""
        old, new = {verdict for _, verdict in before}, {verdict for _, verdict in after}
        self._uses.subtract(old - new)
        self._uses.update(new - old)
        self._touched |= old ^ new

    def update_ids(self) -> set[Verdict]:
        """Assign ids to verdicts that came into use and retire unused ones; return verdicts whose ids changed."""
        # Retire first: a new verdict may then get the id that its hash prefers.
        for verdict in self._touched:
            if not self._uses[verdict]:
                del self._uses[verdict]
                if verdict in self._ids:
                    self._ids.remove(verdict)
        for verdict in self._touched & self._uses.keys():
            if verdict not in self._ids:
                self._ids.add(verdict, msgspec.json.encode(verdict).decode())
        reassigned = set(self._ids.reassigned)
        self._ids.reassigned.clear()
        self._update_counters(self._touched | reassigned)
        self._touched.clear()
        return reassigned

    def _update_counters(self, verdicts: set[Verdict]) -> None:
        # Two passes: with a reassigned id, the old counter must go before another verdict creates the same one.
        for verdict in verdicts:
            if old := self._counters.pop(verdict, None):
                self._delta.drop(old)
                del self._current[old.verdict_id]
                self._retired[old.verdict_id] = verdict
        for verdict in verdicts:
            if verdict in self._ids:
                verdict_id = self[verdict]
                self._counters[verdict] = VerdictCounter(self._tenant, verdict_id)
                self._delta.put(self._counters[verdict])
                self._current[verdict_id] = verdict
                self._retired.pop(verdict_id, None)
        for verdict_id in list(self._retired)[:-_MAX_RETIRED]:
            del self._retired[verdict_id]


class PolicyEntries:
    """Keeps the entries of one tenant. `identity_of` returns the numeric identity of a class."""

    def __init__(
        self, delta: DeltaTracker, *, tenant: TenantName, node: NodeName, identity_of: Callable[[IdentityClass], int]
    ) -> None:
        self._delta, self._tenant, self._identity_of = delta, tenant, identity_of
        self._own_host = NodeHost(node)
        self._verdict_ids = VerdictIds(delta, tenant=tenant)
        self._rules: dict[_Side, RulesByPeer] = {}
        self._known: set[IdentityClass] = set()
        # Classes with a workload on this node.
        self._local: set[IdentityClass] = set()
        self._classes: Multimap[Term, IdentityClass] = Multimap()
        # The sides with a rule that has this term for its remote end.
        self._sides: Multimap[Term, _Side] = Multimap()
        self._remotes: Multimap[_Side, IdentityClass | None] = Multimap()
        self._verdicts_of: dict[_Group, L4Verdicts] = {}
        self._entries: dict[_Group, list[PolicyEntry]] = {}
        self._stale: set[_Group] = set()
        # Valid for one update only, so it needs no invalidation.
        self._cache: dict[_Evaluation, L4Verdicts] = {}
        self._tables: dict[_Evaluation, RuleTable] = {}

    @property
    def verdicts(self) -> Mapping[int, Verdict]:
        """The verdict of each verdict id, in use or recently retired."""
        return self._verdict_ids.by_id

    def classes(self, terms: Iterable[Term]) -> set[IdentityClass]:
        """Return the classes with any of the terms."""
        return self._classes.union(terms)

    def add_class(self, new: IdentityClass) -> None:
        """Index a class so that rules find it."""
        self._known.add(new)
        for term in new.terms():
            self._classes.add(term, new)
        self._mark_as_remote(new)

    def remove_class(self, old: IdentityClass) -> None:
        """Remove a class and its rules."""
        self._known.discard(old)
        # Before the terms are removed, as these find the affected sides.
        self._mark_as_remote(old)
        for term in old.terms():
            self._classes.discard(term, old)
        for direction in Direction:
            side = old, direction
            rules = self._rules.pop(side, None)
            for term in rules.terms() if rules else ():
                self._sides.discard(term, side)
            self._mark_as_local(side)

    def set_local(self, identity_class: IdentityClass, *, local: bool) -> None:
        """Set whether a class, which may be removed already, has workloads on this node."""
        if local is (identity_class in self._local):
            return
        # Toggle: the early return has ruled out the unchanged case.
        self._local ^= {identity_class}
        self._mark_as_remote(identity_class)
        for direction in Direction:
            side = identity_class, direction
            rules = self._rules.get(side)
            if rules:
                self._mark_groups(side, rules.terms())

    def identity_changed(self, identity_class: IdentityClass) -> None:
        """Rewrite the entries of a class whose numeric identity has changed."""
        self._mark_as_remote(identity_class)
        for direction in Direction:
            self._mark_as_local((identity_class, direction))

    def change_rules(
        self, subject: IdentityClass, *, add: Iterable[FlowRule] = (), remove: Iterable[FlowRule] = ()
    ) -> None:
        """Add and remove rules of the policies that a class is subject to."""
        changed: defaultdict[_Side, list[FlowRule]] = defaultdict(list)
        for rule in remove:
            if rule.local is None or subject.is_peer(rule.local):
                self._rules[subject, rule.direction].discard(rule)
                changed[subject, rule.direction].append(rule)
        for rule in add:
            if rule.local is None or subject.is_peer(rule.local):
                self._rules.setdefault((subject, rule.direction), RulesByPeer()).add(rule)
                changed[subject, rule.direction].append(rule)
        for side, rules in changed.items():
            self._mark_rules(side, rules)

    def update_entries(self) -> None:
        """Evaluate the marked groups again and record changed entries in the delta."""
        for group in self._stale:
            before, after = self._verdicts_of.pop(group, ()), self._evaluate(group)
            if after:
                self._verdicts_of[group] = after
            self._verdict_ids.replace(before, after)
        # A hash collision may change the ids of verdicts in groups that no change has marked. It is so rare that all
        # groups are searched then: an index of the groups of each verdict would cost every update.
        if reassigned := self._verdict_ids.update_ids():
            self._stale |= {
                group
                for group, verdicts in self._verdicts_of.items()
                if any(verdict in reassigned for _, verdict in verdicts)
            }
        # Drop all old entries before the new ones are put: the delta expects that an item is absent when it is put.
        for group in self._stale:
            for entry in self._entries.pop(group, ()):
                self._delta.drop(entry)
            self._remotes.discard(group[:2], group[2])
        for group in self._stale & self._verdicts_of.keys():
            self._entries[group] = list(self._entries_of(group))
            for entry in self._entries[group]:
                self._delta.put(entry)
            self._remotes.add(group[:2], group[2])
        self._stale.clear()
        self._cache.clear()
        self._tables.clear()

    def _mark_rules(self, side: _Side, changed: Iterable[FlowRule]) -> None:
        """Mark the groups of a side that added or removed rules may affect."""
        rules = self._rules[side]
        # A rule for any peer is in every group of the side. The first and the last rule create and remove groups.
        if not rules or not self._remotes[side] or any(map(matches_any_peer, changed)):
            self._mark_as_local(side)
        terms = {term for rule in changed for term, _ in remote_terms(rule)}
        self._mark_groups(side, terms)
        for term in terms:
            if rules.has_term(term):
                self._sides.add(term, side)
            else:
                self._sides.discard(term, side)

    def _mark_groups(self, side: _Side, terms: Iterable[Term]) -> None:
        """Mark the groups of a side with the remote classes that have any of the terms."""
        # The classes first: rules that overlap name the same classes again and again.
        self._stale |= {(*side, remote) for remote in self.classes(terms)}

    def _mark_as_local(self, side: _Side) -> None:
        """Mark all groups of a side, including those that it gets with its first rule."""
        self._stale |= {(*side, remote) for remote in self._remotes[side]}
        self._stale.add((*side, None))
        # The node's own host is always allowed (kubelet probes), so it has a group next to any other ingress rule.
        if side[1] is Direction.INGRESS:
            self._stale |= {(*side, host) for host in self._classes[self._own_host]}

    def _mark_as_remote(self, remote: IdentityClass) -> None:
        """Mark all groups with a remote class."""
        self._stale |= {(*side, remote) for side in self._sides.union(remote.terms())}
        if self._is_own_host(remote):
            self._stale |= {(*side, remote) for side in self._rules if side[1] is Direction.INGRESS}

    def _evaluate(self, group: _Group) -> L4Verdicts:
        """Return the verdicts of a side for a remote class or for any; empty if the rules need no such group."""
        local, direction, remote = group
        rules_by_peer = self._rules.get((local, direction))
        if not rules_by_peer:
            return ()
        if remote is None:
            # Named ports resolve on the destination. For egress to any remote there is no single destination.
            ports = local.ports if direction is Direction.INGRESS else frozenset[PodPort]()
            return self._evaluate_l4((rules_by_peer.rules_for_any(), direction, ports), rules_by_peer)
        if remote not in self._known or not self._may_communicate(local, remote):
            return ()
        if direction is Direction.INGRESS and self._is_own_host(remote):
            return ((ANY_L4, Verdict(OWN_HOST_ID, Action.ALLOW, direction)),)
        destination = local if direction is Direction.INGRESS else remote
        rules = rules_by_peer.rules_for(remote)
        return self._evaluate_l4((rules, direction, destination.ports), rules_by_peer) if rules else ()

    def _may_communicate(self, local: IdentityClass, remote: IdentityClass) -> bool:
        """Return whether packets between two classes can pass this node. Non-workloads may come through its host."""
        return remote.kind is not IdentityKind.WORKLOAD or local in self._local or remote in self._local

    def _evaluate_l4(self, evaluation: _Evaluation, of: RulesByPeer) -> L4Verdicts:
        """Return the verdicts of rules; cached, as many groups of one update have the same rules."""
        if evaluation not in self._cache:
            rules, direction, ports = evaluation
            # Where rules overlap, the groups of a side differ in few of very many rules.
            if len(rules) > _MASKED_RULES and len(of) <= min(len(rules) * _MASKED_PART, MAX_MASKED_RULES):
                self._cache[evaluation] = self._table(of, direction, ports).verdicts_of(rules)
            else:
                self._cache[evaluation] = tuple(l4_verdicts(rules, direction=direction, ports=ports))
        return self._cache[evaluation]

    def _table(self, of: RulesByPeer, direction: Direction, ports: frozenset[PodPort]) -> RuleTable:
        """The table of all rules of a side; many sides of one update have the same rules."""
        key = of.all_rules(), direction, ports
        if key not in self._tables:
            self._tables[key] = RuleTable(key[0], direction=direction, ports=ports)
        return self._tables[key]

    def _is_own_host(self, identity_class: IdentityClass) -> bool:
        return identity_class.kind is IdentityKind.HOST and identity_class.node == self._own_host.node != ""

    def _entries_of(self, group: _Group) -> Iterator[PolicyEntry]:
        local, direction, remote = group
        identities = self._identity_of(local), None if remote is None else self._identity_of(remote)
        for l4_match, verdict in self._verdicts_of[group]:
            yield PolicyEntry(self._tenant, direction, *identities, self._verdict_ids[verdict], *l4_match)
