"""How often each rule was met on this node, from the datapath's counts of outcomes.

A rule that denies is counted packet by packet. One that allows is counted each time it was asked: once for a
connection, and once more after each change of policy. What a dry run would have refused has passed, and is counted for
both rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from weft.agent.dataplane.policy import TenantPolicy
from weft.domain.ids import TenantName
from weft.domain.policy.model.rules import Action
from weft.ports.datapath import VerdictCounters

# How many rules are told one by one.
MOST_RULES = 1000


class RuleAction(StrEnum):
    """What a rule did to the packets that are counted."""

    ALLOWED = "allowed"
    DENIED = "denied"
    # They passed, and would not have if the rule's dry run had been in force.
    WOULD_DENY = "would-deny"


class RuleCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often one rule did one thing."""

    tenant: TenantName
    rule: str
    direction: str
    deed: RuleAction
    packets: int


class Counts(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Rules that were met, the most frequent first; and what was refused for reasons of our own."""

    rules: list[RuleCount]
    reasons: dict[str, int]
    # How many more there are.
    left_out: int = 0

    def shortened(self) -> Counts:
        """The same with at most so many rules as are told one by one."""
        left_out = max(len(self.rules) - MOST_RULES, 0)
        return msgspec.structs.replace(self, rules=self.rules[:MOST_RULES], left_out=left_out)


def count_rules(counters: Iterable[VerdictCounters], policies: Mapping[TenantName, TenantPolicy]) -> Counts:
    """The counts by rule. Outcomes that nobody knows any more are left out."""
    met: Counter[tuple[TenantName, str, str, RuleAction]] = Counter()
    reasons: Counter[str] = Counter()
    for each in counters:
        reasons.update(each.reasons)
        policy = policies.get(each.tenant)
        known = policy.tables.outcomes if policy else {}
        for number, packets in each.outcomes.items():
            outcome = known.get(number)
            if outcome is None or not packets:
                continue
            deed = RuleAction.DENIED if outcome.action is Action.DENY else RuleAction.ALLOWED
            met[each.tenant, outcome.rule, outcome.direction, deed] += packets
            if outcome.would is not None:
                met[each.tenant, outcome.would, outcome.direction, RuleAction.WOULD_DENY] += packets
    rules = [
        RuleCount(tenant=tenant, rule=rule, direction=direction, deed=deed, packets=packets)
        for (tenant, rule, direction, deed), packets in met.items()
    ]
    rules.sort(key=lambda each: (-each.packets, each.rule, each.deed))
    return Counts(rules=rules, reasons=dict(sorted(reasons.items())))
