"""The decision: which rule of an ordered list speaks for a flow.

The list is read tier by tier; in each tier the first rule that matches is the tier's word.

- Deny ends the matter, and so does allow, with one exception: after an allow of the group tier the namespace tier is
  asked too, so where Contiv rules and NetworkPolicies meet on one workload both must allow.
- Pass, or no match, goes on to the next tier; the baseline is asked only when no earlier tier had a word.
- Where nobody spoke the flow is allowed, by `weft/default`.

Two rules of our own stand before all others: tenants never meet, and a workload is always reachable from the host of
its own node (kubelet's probes; who owns that host owns the workload anyway). Rules of a dry run never decide.
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

# Whether an identity is a member of a set at present.
IsMember = Callable[[Identity, MemberSet], bool]


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """The first packet of a connection. `port` is 0 where the protocol has none; `version` is the family, 4 or 6."""

    source: Identity
    target: Identity
    protocol: int
    port: int = 0
    version: int = 4

    def ends(self, direction: Direction) -> tuple[Identity, Identity]:
        """The protected end and the remote end, seen in this direction."""
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
    """What keeps the rule from matching the flow; nothing when it matches."""
    local, remote = flow.ends(rule.direction)
    if rule.local is not None and not _is_peer(rule.local, local, flow.version, is_member):
        yield Miss.LOCAL
    if rule.peers is not None and not any(_is_peer(peer, remote, flow.version, is_member) for peer in rule.peers):
        yield Miss.PEER
    if rule.services is not None and not any(_is_service(service, flow) for service in rule.services):
        yield Miss.SERVICE


def matches(rule: FlowRule, flow: Flow, is_member: IsMember) -> bool:
    """Whether the rule speaks about the flow."""
    return next(misses(rule, flow, is_member), None) is None


def decide(rules: Iterable[FlowRule], is_match: Callable[[FlowRule], bool], *, direction: Direction) -> FlowRule:
    """The rule that decides among rules in order of precedence; without any word, the default."""
    word: FlowRule | None = None
    spoken: Tier | None = None
    for rule in rules:
        if rule.tier is spoken or (word is not None and rule.tier is Tier.BASELINE):
            continue
        if not is_match(rule):
            continue
        spoken = rule.tier
        if rule.action is Action.PASS:
            continue
        if rule.action is Action.DENY or rule.tier is not Tier.GROUP:
            return rule
        word = rule
    return word or built_in(DEFAULT_ALLOW_ID, direction, Action.ALLOW)


def first_word(flow: Flow, direction: Direction) -> FlowRule | None:
    """The rule of our own that decides before any policy, if one applies."""
    local, remote = flow.ends(direction)
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
    address = identity.address(version)
    return address is not None and address in peer.addresses


def _is_service(service: PortMatch, flow: Flow) -> bool:
    if flow.protocol not in service.protocols:
        return False
    if service.name:
        return flow.target.calls(service.name, protocol=flow.protocol, port=flow.port)
    return service.first <= flow.port <= service.last
