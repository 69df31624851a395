"""Compares the verdicts of two cluster states without enumerating every flow.

Workloads that no rule of either state distinguishes form one `PeerClass`; so do world addresses. The rules of one end
are evaluated once for all remote classes that look alike to these rules, and protocols and ports are compared by
equivalence class. Only pairs with an end that the change affects are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from weft.domain.addresses import Address, Range
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.explain.header_space import (
    AddressClasses,
    L4Class,
    common_refinement,
    format_l4_classes,
    l4_classes,
    portless_protocols,
)
from weft.domain.policy.model.identities import Identity, IdentityKey, identity_of_world
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.policy.model.rules import Action, CompiledPolicy, Direction, FlowRule, MemberSet, PolicyId, RuleId


# Compared by identity (eq=False): classes are dict keys in hot loops, and comparing their members would dominate.
class PeerClass(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Equivalent workloads (`members`) or world addresses, represented by one of them in each state."""

    before: Identity
    after: Identity
    policies: frozenset[PolicyId] = frozenset()
    members: tuple[IdentityKey, ...] = ()
    addresses: Range | None = None
    changed: bool = False


class VerdictChange(msgspec.Struct, frozen=True):
    """Protocols and ports of one IP version that become allowed or blocked, and the deciding rule."""

    allowed: bool
    decided_by: RuleId
    services: tuple[str, ...]
    version: int


class _RemoteView(NamedTuple):
    """A remote class as seen by the rules of a local one. Views with the same key get the same verdicts."""

    local: PeerClass
    remote: PeerClass
    direction: Direction
    version: int
    key: Hashable
    remote_changed: bool

    @property
    def may_differ(self) -> bool:
        return self.local.changed or self.remote_changed


class _SideVerdicts(msgspec.Struct, frozen=True, eq=False):
    """The deciding rules of one end, before and after, by protocol and port."""

    decisions: list[tuple[L4Class, tuple[FlowRule, FlowRule]]]
    differs: bool


class _Visibility:
    """What the rules of some policies can distinguish of a remote end."""

    def __init__(self, policies: Iterable[CompiledPolicy]) -> None:
        policies = tuple(policies)
        self._sets = _named_sets(policies)
        self._address_classes = AddressClasses(_address_sets(policies))

    def key_of(self, end: Identity, sets: frozenset[MemberSet], version: int) -> Hashable:
        """Return a key that is equal for ends which the rules cannot tell apart."""
        address = end.address(version)
        return sets & self._sets, address and self._address_classes.class_of(address), end.tenant, end.ports


class Comparison:
    """Finds every pair of classes between which a verdict changes."""

    def __init__(self, before: Engine, after: Engine) -> None:
        self._before, self._after = before, after
        self.workloads = sorted(before.workloads.keys() & after.workloads.keys())
        policies = before.policies.keys() | after.policies.keys()
        self._changed_policies = {key for key in policies if before.policies.get(key) != after.policies.get(key)}
        # A set that only one state names belongs to a changed policy, which is detected by itself.
        self._common_sets = _named_sets(before.policies.values()) & _named_sets(after.policies.values())
        self._changed = {key for key in self.workloads if self._is_changed(key)}
        # Caches. The number of distinct views is far below the number of pairs.
        self._visibility: dict[frozenset[PolicyId], _Visibility] = {}
        self._sides: dict[Hashable, _SideVerdicts] = {}
        self._combined: dict[tuple[_SideVerdicts, _SideVerdicts], list[VerdictChange]] = {}
        self._portless = portless_protocols(rule for policy in self._both_states(policies) for rule in policy.rules)

    def changes(self) -> Iterator[tuple[PeerClass, PeerClass, VerdictChange]]:
        """Yield source, destination, and what becomes allowed or blocked between them."""
        classes = [*self._workload_classes(), *self._world_classes()]
        for changed in (peer_class for peer_class in classes if peer_class.changed):
            for other in classes:
                # The loops visit a pair of changed classes twice, once in each order.
                pairs = [(changed, other)] if other.changed else [(changed, other), (other, changed)]
                for source, target in pairs:
                    for verdict_change in self._verdict_changes(source, target):
                        yield source, target, verdict_change

    def _is_changed(self, key: IdentityKey) -> bool:
        """Return whether other rules apply to the workload, or rules that both states have match it differently."""
        policies = self._after.policies_of(key)
        if policies != self._before.policies_of(key) or not self._changed_policies.isdisjoint(policies):
            return True
        moved = self._before.sets_of(key) ^ self._after.sets_of(key)
        old, new = self._before.workloads[key], self._after.workloads[key]
        return not moved.isdisjoint(self._common_sets) or (
            (old.tenant, old.addresses, old.ports) != (new.tenant, new.addresses, new.ports)
        )

    def _workload_classes(self) -> Iterator[PeerClass]:
        policies = [*self._before.policies.values(), *self._after.policies.values()]
        address_classes = AddressClasses(_address_sets(policies))
        equivalent: dict[Hashable, list[IdentityKey]] = defaultdict(list)
        for key in self.workloads:
            old, new = self._before.workloads[key], self._after.workloads[key]
            classes = tuple(address_classes.class_of(address) for address in (*old.addresses, *new.addresses))
            # The key holds everything a rule can match on, in both states.
            sets = self._before.sets_of(key), self._after.sets_of(key)
            equivalent[old.tenant, new.tenant, old.ports, new.ports, classes, sets].append(key)
        for keys in equivalent.values():
            yield PeerClass(
                before=self._before.workloads[keys[0]],
                after=self._after.workloads[keys[0]],
                policies=self._policies_of(keys[0]),
                members=tuple(keys),
                changed=keys[0] in self._changed,
            )

    def _world_classes(self) -> Iterator[PeerClass]:
        # Only policies of changed workloads matter: the world has no rules and does not change.
        relevant = {policy for key in self._changed for policy in self._policies_of(key)}
        address_classes = AddressClasses(_address_sets(self._both_states(relevant)))
        for version in (4, 6):
            for addresses in address_classes.ranges(version):
                world = identity_of_world(Address(version, addresses.first))
                yield PeerClass(before=world, after=world, addresses=addresses)

    def _verdict_changes(self, source: PeerClass, target: PeerClass) -> Iterator[VerdictChange]:
        for version in (4, 6):
            ends = (source.before, source.after, target.before, target.after)
            # Without an address there are no packets. Gaining or losing one is no policy change.
            if any(end.address(version) is None for end in ends):
                continue
            views = (
                self._view(source, target, Direction.EGRESS, version),
                self._view(target, source, Direction.INGRESS, version),
            )
            if any(view.may_differ and self._side(view).differs for view in views):
                yield from self._combine(self._side(views[0]), self._side(views[1]), version)

    def _view(self, local: PeerClass, remote: PeerClass, direction: Direction, version: int) -> _RemoteView:
        visibility = self._visibility.get(local.policies)
        if visibility is None:
            visibility = self._visibility[local.policies] = _Visibility(self._both_states(local.policies))
        old = visibility.key_of(remote.before, self._before.sets_of(remote.before.key), version)
        new = visibility.key_of(remote.after, self._after.sets_of(remote.after.key), version)
        # Without rules, all classes of one tenant are equivalent as the local end.
        local_key = local if local.policies else (local.before.tenant, local.after.tenant)
        return _RemoteView(local, remote, direction, version, (local_key, direction, version, old, new), old != new)

    def _side(self, view: _RemoteView) -> _SideVerdicts:
        if view.key not in self._sides:
            self._sides[view.key] = self._evaluate_side(view.local, view.remote, view.direction, view.version)
        return self._sides[view.key]

    def _evaluate_side(self, local: PeerClass, remote: PeerClass, direction: Direction, version: int) -> _SideVerdicts:
        source, target = (remote, local) if direction is Direction.INGRESS else (local, remote)
        # Partition by the rules of both states, so that each class has one verdict before and one after.
        classes = l4_classes(
            (
                *self._before.rule_set(local.before.key).of(direction),
                *self._after.rule_set(local.after.key).of(direction),
            ),
            ports=(*target.before.ports, *target.after.ports),
            portless=self._portless,
            version=version,
        )
        decisions = [
            (
                l4_class,
                (
                    self._before.deciding_rule(_flow(source.before, target.before, l4_class, version), direction),
                    self._after.deciding_rule(_flow(source.after, target.after, l4_class, version), direction),
                ),
            )
            for l4_class in classes
        ]
        return _SideVerdicts(decisions, any(old.action is not new.action for _, (old, new) in decisions))

    def _combine(self, egress: _SideVerdicts, ingress: _SideVerdicts, version: int) -> list[VerdictChange]:
        """Return the changes of the verdict of both ends together: a flow is allowed if both allow it."""
        key = (egress, ingress)
        if key not in self._combined:
            changed: dict[tuple[bool, RuleId], list[L4Class]] = defaultdict(list)
            refinement = common_refinement(egress.decisions, ingress.decisions)
            for l4_class, (old_egress, new_egress), (old_ingress, new_ingress) in refinement:
                allowed = _both_allow(new_egress, new_ingress)
                if allowed != _both_allow(old_egress, old_ingress):
                    decider = new_ingress if new_egress.action is Action.ALLOW else new_egress
                    changed[allowed, decider.id].append(l4_class)
            self._combined[key] = [
                VerdictChange(allowed, rule, format_l4_classes(classes), version)
                for (allowed, rule), classes in changed.items()
            ]
        return self._combined[key]

    def _policies_of(self, key: IdentityKey) -> frozenset[PolicyId]:
        return self._before.policies_of(key) | self._after.policies_of(key)

    def _both_states(self, policies: Iterable[PolicyId]) -> Iterator[CompiledPolicy]:
        for policy in policies:
            for engine in (self._before, self._after):
                if policy in engine.policies:
                    yield engine.policies[policy]


def _flow(source: Identity, target: Identity, l4_class: L4Class, version: int) -> Flow:
    # Any port of the class represents it.
    return Flow(source=source, target=target, protocol=l4_class.protocol, port=l4_class.first, version=version)


def _both_allow(egress: FlowRule, ingress: FlowRule) -> bool:
    return egress.action is Action.ALLOW and ingress.action is Action.ALLOW


def _named_sets(policies: Iterable[CompiledPolicy]) -> set[MemberSet]:
    return {member_set for policy in policies for member_set in policy.sets()}


def _address_sets(policies: Iterable[CompiledPolicy]) -> Iterator[AddressSet]:
    for policy in policies:
        for peer in policy.peers():
            if peer.addresses is not None:
                yield peer.addresses
