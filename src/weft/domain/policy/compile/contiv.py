"""Compiles Contiv groups, policies and rules to the common rule form.

A rule of direction `in` applies to flows to the members of every group that attaches its policy, `out` to flows from
them. `from*` matches the source and `to*` the destination; fields given together must all match. A name that refers to
nothing matches nothing (W23), in deny rules as in allow rules. A network stands for its subnets.

A policy fails closed while its document, one of its rules or a network that they name is unreadable: nobody knows what
it denied, so it denies everything to the groups that attach it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Self

from weft.domain.addresses import Range, parse_subnet_v4, parse_subnet_v6
from weft.domain.ids import GroupKey, GroupName, NetworkKey, NetworkName, PolicyName, RuleId, TenantName
from weft.domain.model import Group, Network, Policy, Rule
from weft.domain.policy.model import rules as ir
from weft.domain.policy.model.multimap import Multimap
from weft.domain.policy.model.protocols import ICMP_EITHER, PORTED, protocol_number
from weft.domain.policy.model.ranges import AddressSet, address_set, overlap
from weft.domain.validation import parse_rule_address

PolicyKey = tuple[TenantName, PolicyName]
RuleKey = tuple[TenantName, PolicyName, RuleId]

_ACTIONS = {"allow": ir.Action.ALLOW, "deny": ir.Action.DENY}


def policy_id(policy: PolicyKey) -> ir.PolicyId:
    return ir.PolicyId(f"contiv/{policy[0]}/{policy[1]}")


class ContivCompiler:
    """Holds the Contiv objects and compiles policies.

    Every `put_` and `remove_` returns the policies to compile again. Removing an absent object is not an error (W24).
    """

    def __init__(self) -> None:
        self._groups: dict[GroupKey, Group] = {}
        self._policies: dict[PolicyKey, Policy] = {}
        self._rules: dict[RuleKey, Rule] = {}
        self._networks: dict[NetworkKey, Network] = {}
        self._rules_of_policy: dict[PolicyKey, tuple[RuleKey, ...]] = {}
        self._rules_of_network: Multimap[NetworkKey, RuleKey] = Multimap()
        self._groups_of_policy: Multimap[PolicyKey, GroupKey] = Multimap()
        # Rules are cached: a policy with thousands of rules recompiles only the changed ones.
        self._compiled: dict[RuleKey, ir.FlowRule] = {}
        self._uncompiled: Multimap[PolicyKey, RuleKey] = Multimap()
        # What is stored and unreadable: policies by the document at fault, and networks.
        self._unreadable: Multimap[PolicyKey, tuple[str, ...]] = Multimap()
        self._unreadable_networks: dict[NetworkKey, None] = {}

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = type(self)()
        for name, table in vars(self).items():
            setattr(twin, name, table.copy())
        return twin

    def put_policy(self, policy: Policy) -> set[PolicyKey]:
        key = (policy.tenant, policy.name)
        old = self._policies.get(key)
        # `audit` is a property of the policy that every compiled rule carries.
        if old is not None and old.audit is not policy.audit:
            self._invalidate(self._rules_of_policy.get(key, ()))
        self._policies[key] = policy
        return {key}

    def remove_policy(self, key: PolicyKey) -> set[PolicyKey]:
        self._policies.pop(key, None)
        self._invalidate(self._rules_of_policy.get(key, ()))
        return {key}

    def put_rule(self, rule: Rule) -> set[PolicyKey]:
        check_rule(rule)
        key = (rule.tenant, rule.policy, rule.rule_id)
        # The old version may refer to other networks.
        changed = self.remove_rule(key)
        self._rules[key] = rule
        self._uncompiled.add(key[:2], key)
        # Tuples are kept sorted, so that equal states compile to equal policies whatever the order of changes.
        before = self._rules_of_policy.get(key[:2], ())
        index = bisect_left(before, key)
        self._rules_of_policy[key[:2]] = (*before[:index], key, *before[index:])
        for network in _networks_of(rule):
            self._rules_of_network.add(network, key)
        return changed

    def remove_rule(self, key: RuleKey) -> set[PolicyKey]:
        rule = self._rules.pop(key, None)
        if rule is None:
            return {key[:2]}
        self._compiled.pop(key, None)
        self._uncompiled.discard(key[:2], key)
        before = self._rules_of_policy.pop(key[:2])
        index = bisect_left(before, key)
        if len(before) > 1:
            self._rules_of_policy[key[:2]] = (*before[:index], *before[index + 1 :])
        for network in _networks_of(rule):
            self._rules_of_network.discard(network, key)
        return {key[:2]}

    def put_group(self, group: Group) -> set[PolicyKey]:
        # Policies of the old version are recompiled too: the group may not be their subject any more.
        detached = self.remove_group(group.key)
        self._groups[group.key] = group
        attached = _policies_of(group)
        for policy in attached:
            self._groups_of_policy.add(policy, group.key)
        return detached | attached

    def remove_group(self, key: GroupKey) -> set[PolicyKey]:
        group = self._groups.pop(key, None)
        detached = _policies_of(group) if group else set()
        for policy in detached:
            self._groups_of_policy.discard(policy, key)
        return detached

    def put_network(self, network: Network) -> set[PolicyKey]:
        _subnets(network)  # raises `Invalid` before anything changes
        self._networks[network.key] = network
        return self._invalidate_users(network.key)

    def remove_network(self, key: NetworkKey) -> set[PolicyKey]:
        self._networks.pop(key, None)
        return self._invalidate_users(key)

    def _invalidate_users(self, network: NetworkKey) -> set[PolicyKey]:
        rules = self._rules_of_network[network]
        self._invalidate(rules)
        return {rule[:2] for rule in rules}

    def _invalidate(self, rules: Iterable[RuleKey]) -> None:
        for rule in rules:
            self._compiled.pop(rule, None)
            self._uncompiled.add(rule[:2], rule)

    def set_unreadable(self, document: PolicyKey | RuleKey, *, unreadable: bool) -> set[PolicyKey]:
        """Say whether a policy or rule document is stored and unreadable; the rest of it stays as it was put last."""
        key = document[:2]
        # Nearly always nothing changes, and a policy with thousands of rules must not be compiled twice.
        if unreadable is (document in self._unreadable[key]):
            return set()
        (self._unreadable.add if unreadable else self._unreadable.discard)(key, document)
        return {key}

    def set_unreadable_network(self, key: NetworkKey, *, unreadable: bool) -> set[PolicyKey]:
        """The same for a network, which its policies name."""
        if unreadable is (key in self._unreadable_networks):
            return set()
        if unreadable:
            self._unreadable_networks[key] = None
        else:
            self._unreadable_networks.pop(key, None)
        return {rule[:2] for rule in self._rules_of_network[key]}

    def _fails_closed(self, key: PolicyKey) -> bool:
        if self._unreadable[key]:
            return True
        # Empty nearly always.
        return any(rule[:2] == key for network in self._unreadable_networks for rule in self._rules_of_network[network])

    def compile(self, key: PolicyKey) -> ir.CompiledPolicy | None:
        """Return the compiled policy, or None if it does not exist."""
        groups = sorted(self._groups_of_policy[key])
        if self._fails_closed(key):
            subjects = tuple(ir.GroupMembers(group.tenant, group.group) for group in groups)
            return ir.CompiledPolicy(id=policy_id(key), subjects=subjects, rules=ir.deny_all(policy_id(key)))
        policy = self._policies.get(key)
        if policy is None:
            return None
        # A copy, because the loop empties the set.
        for rule in tuple(self._uncompiled[key]):
            self._compiled[rule] = self._compile_rule(self._rules[rule], audit=policy.audit)
            self._uncompiled.discard(key, rule)
        return ir.CompiledPolicy(
            id=policy_id(key),
            subjects=tuple(ir.GroupMembers(group.tenant, group.group) for group in groups),
            rules=tuple(map(self._compiled.__getitem__, self._rules_of_policy.get(key, ()))),
        )

    def _compile_rule(self, rule: Rule, *, audit: bool) -> ir.FlowRule:
        source = self._end(rule.tenant, rule.from_endpoint_group, rule.from_network, rule.from_ip_address)
        target = self._end(rule.tenant, rule.to_endpoint_group, rule.to_network, rule.to_ip_address)
        ingress = rule.direction == "in"
        local, remote = (target, source) if ingress else (source, target)
        return ir.FlowRule(
            id=ir.RuleId(f"contiv/{rule.tenant}/{rule.policy}/{rule.rule_id}"),
            tier=ir.Tier.GROUP,
            direction=ir.Direction.INGRESS if ingress else ir.Direction.EGRESS,
            action=_ACTIONS[rule.action],
            priority=rule.priority,
            peers=None if remote is None else (remote,),
            services=_services(rule),
            local=local,
            audit=audit,
        )

    def _end(self, tenant: TenantName, group: str, network: str, address: str) -> ir.Peer | None:
        if not (group or network or address):
            return None
        return ir.Peer(
            members=ir.GroupMembers(tenant, GroupName(group)) if group else None,
            addresses=self._addresses(NetworkKey(tenant, NetworkName(network)), address),
        )

    def _addresses(self, network: NetworkKey, address: str) -> AddressSet | None:
        if not network.network:
            return address_set([parse_rule_address(address, field="ipAddress")]) if address else None
        # A network that does not exist gives the empty set, which matches nothing (W23), and not None, which is any.
        known = self._networks.get(network)
        subnets = _subnets(known) if known else []
        return address_set(overlap(subnets, [parse_rule_address(address, field="ipAddress")]) if address else subnets)


def check_rule(rule: Rule) -> None:
    """Raise `Invalid` if a rule cannot be compiled, independent of other objects."""
    _services(rule)
    for text, field in ((rule.from_ip_address, "fromIpAddress"), (rule.to_ip_address, "toIpAddress")):
        if text:
            parse_rule_address(text, field=field)


def _services(rule: Rule) -> tuple[ir.PortMatch, ...] | None:
    if not rule.protocol and not rule.port:
        return None
    if not rule.protocol:
        # A port alone means that port of every protocol with ports.
        protocols: tuple[int, ...] = PORTED
    elif rule.protocol == "icmp":
        protocols = ICMP_EITHER
    else:
        protocols = (protocol_number(rule.protocol),)
    # A port has no meaning for a protocol without ports, so the rule covers the protocol.
    if not rule.port or not set(protocols) <= set(PORTED):
        return (ir.PortMatch(protocols=protocols),)
    return (ir.PortMatch(protocols=protocols, first=rule.port, last=rule.port),)


def _policies_of(group: Group) -> set[PolicyKey]:
    return {(group.tenant, name) for name in group.policies}


def _networks_of(rule: Rule) -> set[NetworkKey]:
    return {NetworkKey(rule.tenant, NetworkName(name)) for name in (rule.from_network, rule.to_network) if name}


def _subnets(network: Network) -> list[Range]:
    subnets = [parse_subnet_v4(network.subnet).whole]
    if network.ipv6_subnet:
        subnets.append(parse_subnet_v6(network.ipv6_subnet).whole)
    return subnets
