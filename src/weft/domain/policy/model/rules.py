"""The common rule form: ordered rules, the same for every policy API.

A rule set belongs to one identity and has one list per direction, in order of precedence:

1. by tier: `ADMIN`, `GROUP` (Contiv), `NAMESPACE` (NetworkPolicy), `BASELINE`;
2. within a tier by priority, the greater first;
3. at equal priority deny before allow before pass, then by id, so that the order never depends on history.

`engine.decide` evaluates such a list. In every field `None` means *any* and the empty tuple or set means *none*: empty
and absent are never the same (CVE-2025-64715).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum, StrEnum
from typing import NewType

import msgspec

from weft.domain.ids import GroupName, TenantName
from weft.domain.policy.model.identities import IdentityKey
from weft.domain.policy.model.protocols import MAX_PORT, PORTED, protocol_name
from weft.domain.policy.model.ranges import AddressSet
from weft.domain.selectors import Selector

# `contiv/TENANT/POLICY/RULE`, `k8s/NAMESPACE/POLICY/ingress/0`, or `weft/…` for built-in rules.
RuleId = NewType("RuleId", str)

# `contiv/TENANT/POLICY` or `k8s/NAMESPACE/POLICY`.
PolicyId = NewType("PolicyId", str)


class Tier(IntEnum):
    """The order of evaluation. Admin and baseline are reserved for ClusterNetworkPolicy."""

    # The numbers are the sort order.
    ADMIN = 0
    GROUP = 1
    NAMESPACE = 2
    BASELINE = 3


class Action(StrEnum):
    """The action of a rule on matching flows. `PASS` skips to the next tier."""

    DENY = "deny"
    ALLOW = "allow"
    PASS = "pass"  # noqa: S105


class Direction(StrEnum):
    """The direction of a flow as seen from the identity that the rule applies to."""

    INGRESS = "ingress"
    EGRESS = "egress"


# Deny first is the safe choice between contradicting rules of equal priority.
_ACTION_RANK = {Action.DENY: 0, Action.ALLOW: 1, Action.PASS: 2}


# Sets, peers and rules are dict keys throughout the engine: `cache_hash` avoids hashing selectors repeatedly.
class GroupMembers(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The workloads of a Contiv group; empty while the group does not exist (W23)."""

    tenant: TenantName
    group: GroupName

    def __str__(self) -> str:
        return f"group {self.tenant}:{self.group}"


class PodsOfNamespace(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The pods of one namespace with matching labels."""

    namespace: str
    pods: Selector

    def __str__(self) -> str:
        return f"pods [{self.pods}] of namespace {self.namespace}"


class PodsOfNamespaces(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The pods with matching labels in every namespace with matching labels."""

    namespaces: Selector
    pods: Selector

    def __str__(self) -> str:
        return f"pods [{self.pods}] of namespaces [{self.namespaces}]"


# A set of workloads by definition; `engine.membership` keeps its current members.
MemberSet = GroupMembers | PodsOfNamespace | PodsOfNamespaces


class Peer(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, gc=False):
    """Matches one end of a flow: it must be a member of the set *and* have one of the addresses."""

    members: MemberSet | None = None
    addresses: AddressSet | None = None

    def __str__(self) -> str:
        return (
            " with address in ".join(str(part) for part in (self.members, self.addresses) if part is not None) or "any"
        )


class PortMatch(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, gc=False):
    """Matches one of the protocols and a port in the range, or the destination's port of this name."""

    protocols: tuple[int, ...]
    first: int = 0
    last: int = MAX_PORT
    name: str = ""

    def __str__(self) -> str:
        protocols = "|".join(map(protocol_name, self.protocols))
        if self.name:
            return f"{protocols}/{self.name}"
        if (self.first, self.last) == (0, MAX_PORT) or not set(self.protocols) <= set(PORTED):
            return protocols
        return f"{protocols}/{self.first}" if self.first == self.last else f"{protocols}/{self.first}-{self.last}"


class FlowRule(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, gc=False):
    """One rule, for flows of one direction. `local` restricts it to some of the selected identities."""

    id: RuleId
    tier: Tier
    direction: Direction
    action: Action
    # Unbounded: a fixed width could overflow (CVE-2026-25804).
    priority: int = 0
    peers: tuple[Peer, ...] | None = None
    services: tuple[PortMatch, ...] | None = None
    local: Peer | None = None
    audit: bool = False

    @property
    def order(self) -> tuple[int, int, int, str]:
        """The sort key of precedence, least first."""
        return self.tier, -self.priority, _ACTION_RANK[self.action], self.id


def _peers(rules: Iterable[FlowRule]) -> Iterator[Peer]:
    for rule in rules:
        yield from rule.peers or ()
        if rule.local is not None:
            yield rule.local


class CompiledPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One compiled policy: its rules, and the sets of workloads that it selects."""

    id: PolicyId
    subjects: tuple[MemberSet, ...]
    rules: tuple[FlowRule, ...]

    def sets(self, of_rules: Iterable[FlowRule] | None = None) -> Iterator[MemberSet]:
        """Yield every set the policy names, as often as it does: its subjects, and those in these rules or in all."""
        yield from self.subjects
        for peer in _peers(self.rules if of_rules is None else of_rules):
            if peer.members is not None:
                yield peer.members

    def peers(self) -> Iterator[Peer]:
        """Return every peer in the policy's rules, `local` included."""
        return _peers(self.rules)


def changed_rules(old: CompiledPolicy | None, new: CompiledPolicy | None) -> tuple[set[FlowRule], set[FlowRule]]:
    """Return the removed and the added rules between two states of a policy."""
    before, after = set(old.rules if old else ()), set(new.rules if new else ())
    return before - after, after - before


class RuleSet(msgspec.Struct, frozen=True, kw_only=True):
    """All rules that apply to one identity, in order of precedence."""

    identity: IdentityKey
    ingress: tuple[FlowRule, ...] = ()
    egress: tuple[FlowRule, ...] = ()

    def of(self, direction: Direction) -> tuple[FlowRule, ...]:
        return self.ingress if direction is Direction.INGRESS else self.egress


# No Contiv or Kubernetes rule id starts with `weft/`.
DEFAULT_ALLOW_ID = RuleId("weft/default")
OWN_HOST_ID = RuleId("weft/own-host")
TENANTS_ID = RuleId("weft/tenants")


def deny_all(name: str) -> tuple[FlowRule, ...]:
    """The rules of a policy that cannot be read: they precede every other policy and deny both directions."""
    return tuple(
        FlowRule(id=RuleId(f"weft/unreadable/{name}"), tier=Tier.ADMIN, direction=direction, action=Action.DENY)
        for direction in Direction
    )


def built_in(rule: RuleId, direction: Direction, action: Action) -> FlowRule:
    """Return a built-in rule."""
    # No policy outranks the built-in rules, except the default: every policy outranks that.
    tier = Tier.BASELINE if rule == DEFAULT_ALLOW_ID else Tier.ADMIN
    return FlowRule(id=rule, tier=tier, direction=direction, action=action)
