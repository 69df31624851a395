"""The intermediate form: ordered rules, the same for every vocabulary.

A rule set belongs to one identity and has one list per direction, in order of precedence:

1. by tier: `ADMIN`, `GROUP` (Contiv), `NAMESPACE` (NetworkPolicy), `BASELINE`;
2. within a tier by priority, the greater first;
3. at equal priority deny before allow before pass, then by id, so that the order never depends on history.

`decide` says how such a list is read. In every member `None` means *any* and the empty tuple or set means *nothing*:
empty and absent are never the same (CVE-2025-64715).
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

# Where a rule came from: `contiv/TENANT/POLICY/RULE`, `k8s/NAMESPACE/POLICY/ingress/0`, or `weft/…` for our own.
RuleId = NewType("RuleId", str)

# A policy: `contiv/TENANT/POLICY` or `k8s/NAMESPACE/POLICY`.
UnitId = NewType("UnitId", str)


class Tier(IntEnum):
    """Who speaks first. Admin and baseline are kept for ClusterNetworkPolicy."""

    ADMIN = 0
    GROUP = 1
    NAMESPACE = 2
    BASELINE = 3


class Action(StrEnum):
    """What a rule says about the flows it matches. `PASS` hands them to the next tier."""

    DENY = "deny"
    ALLOW = "allow"
    PASS = "pass"  # noqa: S105


class Direction(StrEnum):
    """Seen from the identity that the rule protects."""

    INGRESS = "ingress"
    EGRESS = "egress"


_ACTION_RANK = {Action.DENY: 0, Action.ALLOW: 1, Action.PASS: 2}


class GroupMembers(msgspec.Struct, frozen=True, cache_hash=True, gc=False):
    """The workloads of a Contiv group; nobody while the group does not exist (W23)."""

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


# Workloads by definition; `membership` keeps who that is at present.
MemberSet = GroupMembers | PodsOfNamespace | PodsOfNamespaces


class Peer(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, gc=False):
    """Who an end of the flow must be: a member of the set *and* at one of the addresses."""

    members: MemberSet | None = None
    addresses: AddressSet | None = None

    def __str__(self) -> str:
        return " at ".join(str(part) for part in (self.members, self.addresses) if part is not None) or "anyone"


class PortMatch(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True, gc=False):
    """Which service: one of the protocols, and a port in the range, or the port that the target gives this name."""

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


class FlowRule(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """One rule, for flows of one direction. `local` narrows which of the protected identities it speaks about."""

    id: RuleId
    tier: Tier
    direction: Direction
    action: Action
    priority: int = 0
    peers: tuple[Peer, ...] | None = None
    services: tuple[PortMatch, ...] | None = None
    local: Peer | None = None
    dry_run: bool = False

    @property
    def order(self) -> tuple[int, int, int, str]:
        """The sort key of precedence."""
        return self.tier, -self.priority, _ACTION_RANK[self.action], self.id


def _peers(rules: Iterable[FlowRule]) -> Iterator[Peer]:
    for rule in rules:
        yield from rule.peers or ()
        if rule.local is not None:
            yield rule.local


class CompiledPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """One policy, compiled: its rules, and the sets of workloads that they protect."""

    id: UnitId
    subjects: tuple[MemberSet, ...]
    rules: tuple[FlowRule, ...]

    def sets(self, of_rules: Iterable[FlowRule] | None = None) -> Iterator[MemberSet]:
        """Every set that the policy names, as often as it does: for its subjects, and in these rules or in all."""
        yield from self.subjects
        for peer in _peers(self.rules if of_rules is None else of_rules):
            if peer.members is not None:
                yield peer.members

    def peers(self) -> Iterator[Peer]:
        """Every description of an end in the policy's rules."""
        return _peers(self.rules)


def changed_rules(old: CompiledPolicy | None, new: CompiledPolicy | None) -> tuple[set[FlowRule], set[FlowRule]]:
    """The rules that went and those that came between two states of a policy."""
    before, after = set(old.rules if old else ()), set(new.rules if new else ())
    return before - after, after - before


class RuleSet(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one identity is subject to, in order of precedence."""

    identity: IdentityKey
    ingress: tuple[FlowRule, ...] = ()
    egress: tuple[FlowRule, ...] = ()

    def of(self, direction: Direction) -> tuple[FlowRule, ...]:
        return self.ingress if direction is Direction.INGRESS else self.egress


DEFAULT_ALLOW_ID = RuleId("weft/default")
OWN_HOST_ID = RuleId("weft/own-host")
TENANTS_ID = RuleId("weft/tenants")


def built_in(rule: RuleId, direction: Direction, action: Action) -> FlowRule:
    """A rule of ours that no policy can outrank or, for the default, that every policy outranks."""
    tier = Tier.BASELINE if rule == DEFAULT_ALLOW_ID else Tier.ADMIN
    return FlowRule(id=rule, tier=tier, direction=direction, action=action)
