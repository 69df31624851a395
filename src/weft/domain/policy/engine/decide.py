"""Rule evaluation: which rule of an ordered list decides about a flow.

The list is evaluated tier by tier; within a tier the first matching rule applies.

- Deny is final. Allow is final too, with one exception: after an allow of the group tier the namespace tier is
  evaluated as well. So where Contiv rules and NetworkPolicies select the same workload, both must allow.
- Pass, or no match, continues with the next tier. The baseline tier applies only if no earlier tier has decided.
- Without a decision the flow is allowed by `weft/default`.

Two built-in rules precede all others: tenants are isolated from each other, and a workload is always reachable from
the host of its own node (kubelet probes; the root user of that host controls the workload anyway). Audit rules never
decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum

import msgspec

from weft.domain.policy.model.identities import Identity, Kind
from weft.domain.policy.model.protocols import service_name
from weft.domain.policy.model.rules import (
    DEFAULT_ALLOW_ID,
    OWN_HOST_ID,
    TENANTS_ID,
    Action,
    Direction,
    FlowRule,
    MemberSet,
    Peer,
    PortMatch,
    Tier,
    built_in,
)

# Returns whether an identity is currently a member of a set.
IsMember = Callable[[Identity, MemberSet], bool]


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet of a connection. `port` is 0 if the protocol has no ports; `version` is 4 or 6."""

    source: Identity
    target: Identity
    protocol: int
    port: int = 0
    version: int = 4

    def ends(self, direction: Direction) -> tuple[Identity, Identity]:
        """Return the local and the remote end for rules of this direction."""
        if direction is Direction.INGRESS:
            return self.target, self.source
        return self.source, self.target

    def __str__(self) -> str:
        return f"{self.source.key} -> {self.target.key} {service_name(self.protocol, self.port)}"


class Miss(Enum):
    """A condition of a rule that a flow does not meet."""

    LOCAL = "local"
    PEER = "peer"
    SERVICE = "service"


def misses(rule: FlowRule, flow: Flow, is_member: IsMember) -> Iterator[Miss]:
    """Yield the conditions that keep the rule from matching the flow; nothing if it matches."""
    local, remote = flow.ends(rule.direction)
    if rule.local is not None and not _is_peer(rule.local, local, flow.version, is_member):
        yield Miss.LOCAL
    if rule.peers is not None and not any(_is_peer(peer, remote, flow.version, is_member) for peer in rule.peers):
        yield Miss.PEER
    if rule.services is not None and not any(_is_service(service, flow) for service in rule.services):
        yield Miss.SERVICE


def matches(rule: FlowRule, flow: Flow, is_member: IsMember) -> bool:
    """Return whether the rule matches the flow."""
    # Stops at the first miss; only explanations need all of them.
    return next(misses(rule, flow, is_member), None) is None


def decide(rules: Iterable[FlowRule], is_match: Callable[[FlowRule], bool], *, direction: Direction) -> FlowRule:
    """Return the deciding rule among rules in order of precedence; the default rule if none decides."""
    group_allow: FlowRule | None = None
    matched_tier: Tier | None = None
    for rule in rules:
        # The first match ends its tier. After a group allow, the baseline tier cannot change the verdict any more.
        if rule.tier is matched_tier or (group_allow is not None and rule.tier is Tier.BASELINE):
            continue
        if not is_match(rule):
            continue
        matched_tier = rule.tier
        if rule.action is Action.PASS:
            continue
        if rule.action is Action.DENY or rule.tier is not Tier.GROUP:
            return rule
        # An allow of the group tier stands only if the namespace tier does not deny.
        group_allow = rule
    return group_allow or built_in(DEFAULT_ALLOW_ID, direction, Action.ALLOW)


def builtin_rule_for(flow: Flow, direction: Direction) -> FlowRule | None:
    """Return the built-in rule that precedes all policies, if one applies."""
    local, remote = flow.ends(direction)
    # Hosts and the world have no tenant: isolation holds between workloads only.
    if local.tenant and remote.tenant and local.tenant != remote.tenant:
        return built_in(TENANTS_ID, direction, Action.DENY)
    if direction is Direction.INGRESS and remote.kind is Kind.HOST and local.node and local.node == remote.node:
        return built_in(OWN_HOST_ID, direction, Action.ALLOW)
    return None


def _is_peer(peer: Peer, identity: Identity, version: int, is_member: IsMember) -> bool:
    if peer.members is not None and not is_member(identity, peer.members):
        return False
    if peer.addresses is None:
        return True
    # Only the address of the flow's own family counts: a dual-stack peer must not match by its other address.
    address = identity.address(version)
    return address is not None and address in peer.addresses


def _is_service(service: PortMatch, flow: Flow) -> bool:
    if flow.protocol not in service.protocols:
        return False
    if service.name:
        # A named port is resolved on the destination: the same name may stand for another number on each pod.
        return flow.target.has_named_port(service.name, protocol=flow.protocol, port=flow.port)
    return service.first <= flow.port <= service.last
