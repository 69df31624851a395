"""The policy engine: holds the cluster state and derives the ordered rules of every workload.

Every change is put or removed on its own and recomputes only what it affects. The result equals that of a new engine
fed with the final state in any order. A value that cannot be compiled raises `Invalid` and changes nothing. The engine
does no I/O and has no clock. It is not safe for concurrent use; change a `copy` to try something out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Self

import msgspec

from weft.domain import model
from weft.domain.addresses import Address, parse_address
from weft.domain.errors import Invalid, NotFound
from weft.domain.ids import DEFAULT_TENANT, EndpointKey, GroupKey, NetworkKey
from weft.domain.policy.compile import contiv, kubernetes
from weft.domain.policy.compile.contiv import ContivCompiler, PolicyKey, RuleKey
from weft.domain.policy.compile.limits import excess_of_compiled
from weft.domain.policy.engine.decide import Flow, builtin_rule_for, decide, matches
from weft.domain.policy.engine.membership import Membership, MembershipChanges
from weft.domain.policy.model.identities import (
    API_SERVER_KEY,
    ApiServer,
    Host,
    Identity,
    IdentityKey,
    Kind,
    Namespace,
    Pod,
    host_key,
    identity_of_api_server,
    identity_of_endpoint,
    identity_of_host,
    identity_of_pod,
    identity_of_world,
    pod_key,
)
from weft.domain.policy.model.multimap import Multimap
from weft.domain.policy.model.netpol import NetworkPolicy
from weft.domain.policy.model.protocols import ICMP, ICMPV6
from weft.domain.policy.model.rules import (
    Action,
    CompiledPolicy,
    Direction,
    FlowRule,
    GroupMembers,
    MemberSet,
    PolicyId,
    RuleSet,
    changed_rules,
    deny_all,
)

# The objects that policy verdicts depend on.
PolicyObject = (
    Pod
    | Namespace
    | Host
    | ApiServer
    | NetworkPolicy
    | model.Endpoint
    | model.Group
    | model.Policy
    | model.Rule
    | model.Network
)

# Ingress and egress rules in order of precedence.
_Ordered = tuple[tuple[FlowRule, ...], tuple[FlowRule, ...]]


class Affected(msgspec.Struct, frozen=True):
    """What a change affected: workloads with another rule set, and sets with other members or member addresses.

    `identities` are those that were added, removed, or changed in their values or in their sets. `policies` are those
    that were added, removed, or changed in their rules or subjects.
    """

    workloads: frozenset[IdentityKey] = frozenset()
    sets: frozenset[MemberSet] = frozenset()
    identities: frozenset[IdentityKey] = frozenset()
    policies: frozenset[PolicyId] = frozenset()

    def __or__(self, other: Affected) -> Affected:
        return Affected(
            self.workloads | other.workloads,
            self.sets | other.sets,
            self.identities | other.identities,
            self.policies | other.policies,
        )


class FlowVerdict(msgspec.Struct, frozen=True):
    """The deciding rule at each end. A flow is allowed if both rules allow it."""

    egress: FlowRule
    ingress: FlowRule

    @property
    def allowed(self) -> bool:
        return self.egress.action is Action.ALLOW and self.ingress.action is Action.ALLOW


class Directory:
    """The known identities. An address belongs to a workload of the tenant, else to a host or the API server.

    Several identities may have one address: tenants overlap, and the API server may run on a node.
    """

    def __init__(self) -> None:
        self._identities: dict[IdentityKey, Identity] = {}
        self._by_address: Multimap[Address, IdentityKey] = Multimap()

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = type(self)()
        twin._identities = self._identities.copy()
        twin._by_address = self._by_address.copy()
        return twin

    def put(self, identity: Identity) -> None:
        # The old version may have other addresses.
        self.remove(identity.key)
        self._identities[identity.key] = identity
        for address in identity.addresses:
            self._by_address.add(address, identity.key)

    def remove(self, key: IdentityKey) -> None:
        identity = self._identities.pop(key, None)
        for address in identity.addresses if identity else ():
            self._by_address.discard(address, key)

    def __iter__(self) -> Iterator[IdentityKey]:
        return iter(self._identities)

    def get(self, key: IdentityKey) -> Identity | None:
        return self._identities.get(key)

    def holders(self, address: Address) -> list[Identity]:
        """Return the identities with this address, of all tenants."""
        # Sorted, so that the result never depends on the order of changes.
        return [self._identities[key] for key in sorted(self._by_address[address])]

    def at(self, address: Address, *, tenant: str) -> Identity:
        """Return the identity of this address for a flow of this tenant; the world if no identity has it."""
        holders = self.holders(address)
        for holder in holders:
            # Workloads of other tenants never match: tenants may overlap, and this flow cannot reach them anyway.
            if holder.tenant == tenant:
                return holder
        for holder in holders:
            if holder.kind is not Kind.WORKLOAD:
                return holder
        return identity_of_world(address)

    def flow(
        self,
        source: str,
        target: str,
        *,
        protocol: int,
        port: int = 0,
        version: int | None = None,
        tenant: str = DEFAULT_TENANT,
    ) -> Flow:
        """Return the flow between two ends, each given by key or address.

        `tenant` resolves addresses if neither end is the key of a workload. Without a version the flow is IPv4 if both
        ends have an IPv4 address. ICMP and ICMPv6 both mean the control messages of the flow's version.
        """
        named = [self.get(IdentityKey(text)) for text in (source, target)]
        scope = next((end.tenant for end in named if end is not None and end.tenant), tenant)
        ends = [end or self._at_text(text, tenant=scope) for end, text in zip(named, (source, target), strict=True)]
        return self.flow_between(*ends, protocol=protocol, port=port, version=version)

    @staticmethod
    def flow_between(
        source: Identity, target: Identity, *, protocol: int, port: int = 0, version: int | None = None
    ) -> Flow:
        """Return the flow between two identities; version and ICMP as in `flow`."""
        version = _common_version(source, target, wanted=version)
        # Operators write `icmp` for both families.
        if protocol in (ICMP, ICMPV6):
            protocol = ICMP if version == 4 else ICMPV6
        return Flow(source=source, target=target, protocol=protocol, port=port, version=version)

    def _at_text(self, text: str, *, tenant: str) -> Identity:
        try:
            address = parse_address(text, field="address")
        except Invalid as error:
            raise NotFound(f"{text!r} is neither a known workload nor a host nor an address") from error
        holder = self.at(address, tenant=tenant)
        # A host has several addresses: the flow uses the requested one.
        return holder if holder.kind is Kind.WORKLOAD else msgspec.structs.replace(holder, addresses=(address,))


def _common_version(source: Identity, target: Identity, *, wanted: int | None) -> int:
    versions = {4, 6} if wanted is None else {wanted}
    for end in (source, target):
        # A workload without an address yet is not an obstacle: its rules can be evaluated already.
        if end.addresses:
            versions &= {address.family for address in end.addresses}
    if not versions:
        raise Invalid(f"{source.key} and {target.key} have no common address family", field="version")
    return min(versions)


class Engine:
    """The policy state of a cluster. `directory` resolves flow ends. Removing an absent object does nothing (W24)."""

    def __init__(self, objects: Iterable[PolicyObject] = ()) -> None:
        self.directory = Directory()
        self._membership = Membership()
        self._contiv = ContivCompiler()
        self._policies: dict[PolicyId, CompiledPolicy] = {}
        self._policies_by_subject: Multimap[MemberSet, PolicyId] = Multimap()
        # A cache: workloads in the same sets have the same rules. Every change of a set or a policy clears it.
        self._ordered: dict[frozenset[MemberSet], _Ordered] = {}
        for value in objects:
            self.put(value)

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = type(self)()
        # Every attribute has a `copy`; the values in them are immutable.
        for name, table in vars(self).items():
            setattr(twin, name, table.copy())
        return twin

    def put(self, value: PolicyObject) -> Affected:
        """Add the object, or replace the one with the same key."""
        match value:
            case Pod():
                return self._put_workload(identity_of_pod(value))
            case model.Endpoint():
                return self._put_workload(identity_of_endpoint(value))
            case Host():
                return self._put_non_workload(identity_of_host(value))
            case ApiServer():
                return self._put_non_workload(identity_of_api_server(value))
            case Namespace():
                return self._affected_by(self._membership.put_namespace(value))
            case NetworkPolicy():
                policy = kubernetes.compile_network_policy(value)
                # Past the bound it fails closed: it must cost its own pods their traffic, not all pods their agent.
                return self.fail_closed(value) if excess_of_compiled(policy) else self._put_policy(policy.id, policy)
            case model.Group():
                # Members join before the policies are compiled, so that these see all subjects.
                affected = self._affected_by(self._membership.put_group(value.key))
                return affected | self._recompile(self._contiv.put_group(value))
            case model.Policy():
                return self._recompile(self._contiv.put_policy(value))
            case model.Rule():
                return self._recompile(self._contiv.put_rule(value))
            case model.Network():
                return self._recompile(self._contiv.put_network(value))

    def put_compiled(self, policy: CompiledPolicy) -> Affected:
        """Put a policy that is compiled already, because that takes long."""
        return self._put_policy(policy.id, policy)

    def fail_closed(self, policy: NetworkPolicy) -> Affected:
        """Put a policy that cannot be compiled: it isolates the pods it selects, and allows them nothing."""
        closed = kubernetes.compile_closed(policy)
        return self._put_policy(closed.id, closed)

    def remove_pod(self, namespace: str, name: str) -> Affected:
        return self._remove_workload(pod_key(namespace, name))

    def remove_endpoint(self, key: EndpointKey) -> Affected:
        return self._remove_workload(IdentityKey(str(key)))

    def remove_host(self, node: str) -> Affected:
        return self._remove_non_workload(host_key(node))

    def remove_api_server(self) -> Affected:
        return self._remove_non_workload(API_SERVER_KEY)

    def remove_namespace(self, name: str) -> Affected:
        return self._affected_by(self._membership.remove_namespace(name))

    def remove_network_policy(self, namespace: str, name: str) -> Affected:
        return self._put_policy(kubernetes.policy_id(namespace, name), None)

    def remove_group(self, key: GroupKey) -> Affected:
        # Members leave before the policies are detached: the policies still tell whose rule sets are affected.
        affected = self._affected_by(self._membership.remove_group(key))
        return affected | self._recompile(self._contiv.remove_group(key))

    def remove_policy(self, key: PolicyKey) -> Affected:
        return self._recompile(self._contiv.remove_policy(key))

    def remove_rule(self, key: RuleKey) -> Affected:
        return self._recompile(self._contiv.remove_rule(key))

    def remove_network(self, key: NetworkKey) -> Affected:
        return self._recompile(self._contiv.remove_network(key))

    def set_unreadable(self, document: PolicyKey | RuleKey | GroupKey | NetworkKey, *, unreadable: bool) -> Affected:
        """Deny everything to what an unreadable document governs, or stop doing so.

        A policy, a rule or a network closes the policies concerned; a group closes its members.
        """
        if isinstance(document, NetworkKey):
            return self._recompile(self._contiv.set_unreadable_network(document, unreadable=unreadable))
        if not isinstance(document, GroupKey):
            return self._recompile(self._contiv.set_unreadable(document, unreadable=unreadable))
        name = PolicyId(f"contiv/{document.tenant}/group/{document.group}")
        if not unreadable:
            return self._put_policy(name, None)
        # The group must exist to have members.
        affected = self._affected_by(self._membership.put_group(document))
        subjects = (GroupMembers(document.tenant, document.group),)
        return affected | self._put_policy(name, CompiledPolicy(id=name, subjects=subjects, rules=deny_all(name)))

    @property
    def workloads(self) -> Mapping[IdentityKey, Identity]:
        return self._membership.workloads

    @property
    def policies(self) -> Mapping[PolicyId, CompiledPolicy]:
        """Every compiled policy, enforced or in audit mode."""
        return self._policies

    def members(self, of: MemberSet) -> Set[IdentityKey]:
        """Return the members of a set that some rule names."""
        return self._membership.members(of)

    def sets_of(self, workload: IdentityKey) -> frozenset[MemberSet]:
        """Return the sets that contain the workload, among the sets that rules name."""
        return self._membership.sets_of(workload)

    def policies_of(self, workload: IdentityKey) -> frozenset[PolicyId]:
        """Return the policies that select the workload."""
        sets = self.sets_of(workload)
        return frozenset(policy for subject in sets for policy in self._policies_by_subject[subject])

    def rule_set(self, workload: IdentityKey) -> RuleSet:
        """Return all rules of the workload in order of precedence, audit rules included."""
        sets = self.sets_of(workload)
        # Large clusters have very many workloads, but few combinations of sets.
        if sets not in self._ordered:
            self._ordered[sets] = self._order(self.policies_of(workload))
        ingress, egress = self._ordered[sets]
        return RuleSet(identity=workload, ingress=ingress, egress=egress)

    def verdict(self, flow: Flow) -> FlowVerdict:
        """Return the deciding rule at each end."""
        return FlowVerdict(
            egress=self.deciding_rule(flow, Direction.EGRESS), ingress=self.deciding_rule(flow, Direction.INGRESS)
        )

    def deciding_rule(self, flow: Flow, direction: Direction) -> FlowRule:
        """Return the deciding rule at one end."""
        # Built-in rules are not in the rule set, so that no policy can outrank them.
        if builtin := builtin_rule_for(flow, direction):
            return builtin
        rules = self.rule_set(flow.ends(direction)[0].key).of(direction)
        return decide(
            (rule for rule in rules if not rule.audit),
            lambda rule: matches(rule, flow, self.is_member),
            direction=direction,
        )

    def is_member(self, identity: Identity, of: MemberSet) -> bool:
        return of in self._membership.sets_of(identity.key)

    def _put_non_workload(self, identity: Identity) -> Affected:
        """Add a host or API server: no set contains it and no policy selects it."""
        self.directory.put(identity)
        return Affected(identities=frozenset({identity.key}))

    def _remove_non_workload(self, key: IdentityKey) -> Affected:
        self.directory.remove(key)
        return Affected(identities=frozenset({key}))

    def _put_workload(self, workload: Identity) -> Affected:
        self.directory.put(workload)
        affected = self._affected_by(self._membership.put_workload(workload))
        return affected | Affected(identities=frozenset({workload.key}))

    def _remove_workload(self, key: IdentityKey) -> Affected:
        self.directory.remove(key)
        affected = self._affected_by(self._membership.remove_workload(key))
        return affected | Affected(identities=frozenset({key}))

    def _affected_by(self, changes: MembershipChanges) -> Affected:
        if changes:
            self._ordered.clear()  # otherwise combinations of sets without a workload would pile up
        subjects = (key for key, sets in changes.items() if any(self._policies_by_subject[subject] for subject in sets))
        return Affected(frozenset(subjects), frozenset().union(*changes.values()), frozenset(changes))

    def _recompile(self, policies: Iterable[PolicyKey]) -> Affected:
        affected = Affected()
        for key in policies:
            affected |= self._put_policy(contiv.policy_id(key), self._contiv.compile(key))
        return affected

    def _put_policy(self, key: PolicyId, new: CompiledPolicy | None) -> Affected:
        old = self._policies.pop(key, None)
        if new is not None:
            self._policies[key] = new
        # Most updates of an object change nothing that is compiled.
        if old == new:
            return Affected()
        self._ordered.clear()
        subjects: set[IdentityKey] = set()
        reselected: set[IdentityKey] = set()
        removed, added = changed_rules(old, new)
        # Watch the new sets before unwatching the old ones, so that a set in both keeps its members.
        for member_set in new.sets(added) if new else ():
            reselected |= self._membership.watch(member_set)
        # Former subjects are affected as well as new ones: they lose rules.
        for subject in old.subjects if old else ():
            subjects |= self.members(subject)
            self._policies_by_subject.discard(subject, key)
        for subject in new.subjects if new else ():
            subjects |= self.members(subject)
            self._policies_by_subject.add(subject, key)
        for member_set in old.sets(removed) if old else ():
            reselected |= self._membership.unwatch(member_set)
        return Affected(workloads=frozenset(subjects), identities=frozenset(reselected), policies=frozenset({key}))

    def _order(self, policies: frozenset[PolicyId]) -> _Ordered:
        unsorted = (rule for policy in policies for rule in self._policies[policy].rules)
        rules = sorted(unsorted, key=lambda rule: rule.order)
        return (
            tuple(rule for rule in rules if rule.direction is Direction.INGRESS),
            tuple(rule for rule in rules if rule.direction is Direction.EGRESS),
        )
