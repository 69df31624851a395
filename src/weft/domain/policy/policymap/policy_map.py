"""The policy map of one tenant: the engine's verdicts as lookup tables (`policy_state`), updated incrementally.

The caller changes the engine and notes what was affected; `refresh` then returns what a datapath has to put and to
drop. The state items follow from the engine's state alone, never from the order of changes. Nodes have different maps
in three respects only: each node allows its own host, omits entries between two classes without a workload on it,
and, for a tenant without policies, holds only the identities of its own workloads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from weft.domain.addresses import Address, Range
from weft.domain.desired.diff import Difference
from weft.domain.ids import NodeName, TenantName
from weft.domain.policy.engine.engine import Affected, Engine
from weft.domain.policy.model.identities import IdentityKey
from weft.domain.policy.model.multimap import Multimap
from weft.domain.policy.model.ranges import address_set
from weft.domain.policy.model.rules import (
    DEFAULT_ALLOW_ID,
    Action,
    CompiledPolicy,
    Direction,
    FlowRule,
    MemberSet,
    PolicyId,
    changed_rules,
)
from weft.domain.policy.policymap.delta_tracker import DeltaTracker
from weft.domain.policy.policymap.identity_classes import FLAGS, IdentityClass, IdentityKind, TermTexts
from weft.domain.policy.policymap.ip_identity import IpIdentityMap, IpKey
from weft.domain.policy.policymap.l4_partition import Verdict
from weft.domain.policy.policymap.policy_entries import PolicyEntries
from weft.domain.policy.policymap.policy_state import CidrIdentity, IpIdentity, PolicyEntry, PolicyItem
from weft.domain.policy.policymap.stable_ids import StableIds


class _Change(NamedTuple):
    """A policy before and after a change, with the removed and the added rules."""

    old: CompiledPolicy
    new: CompiledPolicy
    removed: set[FlowRule]
    added: set[FlowRule]


# Stands for a policy that does not exist.
_ABSENT = CompiledPolicy(id=PolicyId(""), subjects=(), rules=())


class PolicyLookup:
    """Looks up a snapshot of one tenant's state items as a datapath does."""

    def __init__(self, items: Iterable[PolicyItem]) -> None:
        self._ip_identities: dict[Address, int] = {}
        self._cidr_identities: list[tuple[Range, int]] = []
        self._entries: dict[tuple[Direction, int, int | None], list[PolicyEntry]] = {}
        for item in items:
            match item:
                case IpIdentity():
                    self._ip_identities[item.address] = item.identity
                case CidrIdentity():
                    self._cidr_identities.append((item.range, item.identity))
                case PolicyEntry():
                    self._entries.setdefault((item.direction, item.local, item.remote), []).append(item)
        self._cidr_identities.sort()
        self._ranges = [span for span, _ in self._cidr_identities]

    def identity(self, address: Address) -> int:
        """Return the numeric identity of an address, or 0."""
        if address in self._ip_identities:
            return self._ip_identities[address]
        # The third member exceeds any last address, so a range which starts at this address sorts before the probe.
        index = bisect_right(self._ranges, (address.family, address.number, 1 << 128)) - 1
        return self._cidr_identities[index][1] if index >= 0 and self._ranges[index].holds(address) else 0

    def verdict_id(self, source: int, target: int, *, direction: Direction, protocol: int, port: int) -> int | None:
        """Return the verdict id in one direction; None if the local identity has no rules."""
        # Rules belong to the local end: the destination for ingress, the source for egress.
        local, remote = (target, source) if direction is Direction.INGRESS else (source, target)
        entries = self._entries.get((direction, local, remote), []) + self._entries.get((direction, local, None), [])
        matching = (entry for entry in entries if _matches(entry, protocol=protocol, port=port))
        best = min(matching, key=_specificity, default=None)
        return None if best is None else best.verdict_id


def _matches(entry: PolicyEntry, *, protocol: int, port: int) -> bool:
    return entry.protocol in (None, protocol) and (entry.ports is None or entry.ports[0] <= port <= entry.ports[1])


def _specificity(entry: PolicyEntry) -> tuple[bool, bool, bool, bool]:
    """The sort key of the lookup order in `policy_state`: the most specific entry has the least key."""
    return (
        entry.remote is None,
        entry.protocol is None,
        entry.ports is None,
        entry.ports is not None and len(set(entry.ports)) > 1,
    )


class PolicyMap:
    """The policy map of a tenant. The engine holds this tenant's objects, the hosts and the API servers."""

    def __init__(self, engine: Engine, *, tenant: TenantName, node: NodeName) -> None:
        self._engine, self._tenant = engine, tenant
        self._delta = DeltaTracker()
        self._ip_identities = IpIdentityMap(engine, tenant=tenant, node=node)
        self._ids: StableIds[IdentityClass] = StableIds()
        self._entries = PolicyEntries(self._delta, tenant=tenant, node=node, identity_of=self._identity_of)
        self._policies: dict[PolicyId, CompiledPolicy] = {}
        self._policies_by_subject: Multimap[MemberSet, PolicyId] = Multimap()
        self._items_at: dict[IpKey, IpIdentity | CidrIdentity] = {}
        # Built on the first lookup after a refresh.
        self._lookup: PolicyLookup | None = None
        self._noted_identities: set[IdentityKey] = set(engine.directory)
        self._noted_policies: set[PolicyId] = set(engine.policies)
        # Whether `refresh` may return something.
        self.is_stale = True

    @property
    def state_items(self) -> Set[PolicyItem]:
        """The desired state of the datapath, as of the last `refresh`."""
        return self._delta.state_items

    @property
    def verdicts(self) -> Mapping[int, Verdict]:
        """The verdict of each verdict id, in use or recently retired."""
        return self._entries.verdicts

    @property
    def noted_changes(self) -> int:
        """How many identities and policies the next `refresh` looks at."""
        return len(self._noted_identities) + len(self._noted_policies)

    def note(self, affected: Affected) -> None:
        """Record what a change of the engine affected, for the next `refresh`."""
        self._noted_identities |= affected.identities
        self._noted_policies |= affected.policies
        self.is_stale |= bool(self.noted_changes)

    def set_tenant_subnets(self, subnets: Iterable[Range], gateways: Iterable[Address]) -> None:
        """Set the tenant's subnets: an address in them without a known endpoint is an unknown identity."""
        # A gateway is in the subnet, but no endpoint that another node could know.
        holes = [Range(gateway.family, gateway.number, gateway.number) for gateway in gateways]
        self._ip_identities.set_tenant_subnets(address_set(subnets, without=holes))
        self.is_stale = True

    def refresh(self) -> Difference[PolicyItem]:
        """Return what to put and to drop since the last call, in a fixed order. A put may replace a dropped item."""
        # Order matters: policies say which classes exist, classes get their identities, entries refer to both.
        changes = [self._update_policy(key) for key in self._noted_policies]
        self._noted_policies.clear()
        self._ip_identities.update_labels()
        self._ip_identities.set_has_policy(bool(self._policies))
        for identity in self._noted_identities:
            self._ip_identities.update_identity(identity)
        self._noted_identities.clear()
        self._ip_identities.reassign_stale()
        new_classes = self._update_classes()
        for change in changes:
            self._apply_change(change, skip=new_classes)
        self._entries.update_entries()
        self._lookup = None
        self.is_stale = False
        return self._delta.take_delta()

    def lookup(self, source: Address, target: Address, *, protocol: int, port: int = 0) -> tuple[Verdict, Verdict]:
        """Return the verdicts on a flow at its source (egress) and its destination (ingress)."""
        if self._lookup is None:
            self._lookup = PolicyLookup(self.state_items)
        lookup, verdicts = self._lookup, self.verdicts
        identities = lookup.identity(source), lookup.identity(target)

        def verdict(direction: Direction) -> Verdict:
            verdict_id = lookup.verdict_id(*identities, direction=direction, protocol=protocol, port=port)
            return (
                verdicts[verdict_id] if verdict_id is not None else Verdict(DEFAULT_ALLOW_ID, Action.ALLOW, direction)
            )

        return verdict(Direction.EGRESS), verdict(Direction.INGRESS)

    def _update_policy(self, key: PolicyId) -> _Change:
        """Read a policy from the engine, and register the address sets and port names that its rules use."""
        old, new = self._policies.pop(key, _ABSENT), self._engine.policies.get(key, _ABSENT)
        if new is not _ABSENT:
            self._policies[key] = new
        change = _Change(old, new, *changed_rules(old, new))
        self._ip_identities.add_rules(change.added)
        self._ip_identities.remove_rules(change.removed)
        for subject in old.subjects:
            self._policies_by_subject.discard(subject, key)
        for subject in new.subjects:
            self._policies_by_subject.add(subject, key)
        return change

    def _update_classes(self) -> set[IdentityClass]:
        """Assign ids to new classes, remove classes without addresses, and write identities; return new classes."""
        keys = set(self._ip_identities.changed)
        # Classes that lost or gained an address may have to be removed or added.
        affected = {old for old in self._ip_identities.changed.values() if old is not None}
        affected |= {new for new in map(self._ip_identities.get, keys) if new is not None}
        self._ip_identities.changed.clear()
        removed = {each for each in affected if each in self._ids and not self._ip_identities[each]}
        added = {each for each in affected if each not in self._ids and self._ip_identities[each]}
        for old in removed:
            self._ids.remove(old)
            self._entries.remove_class(old)
        if added:
            # For one refresh only, so that texts of sets that no rule names any more do not pile up.
            texts = TermTexts()
            for new in added:
                self._ids.add(new, new.text(texts))
                self._entries.add_class(new)
        for reassigned in self._ids.reassigned:
            self._entries.identity_changed(reassigned)
            # Its addresses did not change, but their identity did.
            keys |= self._ip_identities[reassigned]
        self._ids.reassigned.clear()
        for new in added:
            if new.kind is IdentityKind.WORKLOAD:
                self._entries.change_rules(new, add=self._rules_of(new))
        # After new classes have their rules, as locality decides which groups these need.
        for moved in self._ip_identities.locality_changed:
            self._entries.set_local(moved, local=self._ip_identities.is_local(moved))
        self._ip_identities.locality_changed.clear()
        for key in keys:
            self._write_identity(key)
        return added

    def _write_identity(self, key: IpKey) -> None:
        if old := self._items_at.pop(key, None):
            self._delta.drop(old)
        identity_class = self._ip_identities.get(key)
        if identity_class is None:
            return
        if isinstance(key, Address):
            self._items_at[key] = IpIdentity(self._tenant, key, self._identity_of(identity_class))
        else:
            self._items_at[key] = CidrIdentity(self._tenant, key, self._identity_of(identity_class))
        self._delta.put(self._items_at[key])

    def _apply_change(self, change: _Change, *, skip: Set[IdentityClass]) -> None:
        """Apply a changed policy to its subject classes, except new classes: these have all their rules already."""
        before = self._entries.classes(change.old.subjects) - skip
        after = self._entries.classes(change.new.subjects) - skip
        for subject in before & after:
            self._entries.change_rules(subject, add=change.added, remove=change.removed)
        for subject in before - after:
            self._entries.change_rules(subject, remove=change.old.rules)
        for subject in after - before:
            self._entries.change_rules(subject, add=change.new.rules)

    def _rules_of(self, subject: IdentityClass) -> Iterable[FlowRule]:
        policies = {policy for member_set in subject.sets for policy in self._policies_by_subject[member_set]}
        return (rule for policy in policies for rule in self._policies[policy].rules)

    def _identity_of(self, identity_class: IdentityClass) -> int:
        # Flags are outside the bits of `StableIds`, so they never collide with an id.
        return self._ids[identity_class] | FLAGS.get(identity_class.kind, 0)
