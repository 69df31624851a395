"""Per-rule packet counters of this node, from the datapath's verdict counters.

A deny rule counts packets. An allow rule counts policy evaluations: one per connection, and one more after each policy
change. A packet that a policy in audit mode would have denied has passed, and counts for both rules.
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

# Bounds the answer of `/inspect/driver` and the number of Prometheus series.
MAX_RULE_SERIES = 1000


class RuleAction(StrEnum):
    """What a rule did to the packets it counts."""

    ALLOWED = "allowed"
    DENIED = "denied"
    # The packets passed; the rule is in audit mode and would have denied them.
    WOULD_DENY = "would-deny"


class RuleCount(msgspec.Struct, frozen=True, kw_only=True):
    """Packets of one rule and action."""

    tenant: TenantName
    rule: str
    direction: str
    action: RuleAction
    packets: int


class PolicyCounters(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Per-rule counters, the highest first, and packets dropped by the datapath's own reasons."""

    rules: list[RuleCount]
    reasons: dict[str, int]
    # How many rules were cut from the list.
    truncated: int = 0

    def shortened(self) -> PolicyCounters:
        """The first `MAX_RULE_SERIES` rules."""
        truncated = max(len(self.rules) - MAX_RULE_SERIES, 0)
        return msgspec.structs.replace(self, rules=self.rules[:MAX_RULE_SERIES], truncated=truncated)


def count_rules(counters: Iterable[VerdictCounters], policies: Mapping[TenantName, TenantPolicy]) -> PolicyCounters:
    """Map verdict counters to rules. Verdicts of rules that are long gone are left out."""
    packets_by_rule: Counter[tuple[TenantName, str, str, RuleAction]] = Counter()
    reasons: Counter[str] = Counter()
    for tenant_counters in counters:
        reasons.update(tenant_counters.reasons)
        policy = policies.get(tenant_counters.tenant)
        known = policy.policy_map.verdicts if policy else {}
        for number, packets in tenant_counters.verdicts.items():
            verdict = known.get(number)
            if verdict is None or not packets:
                continue
            action = RuleAction.DENIED if verdict.action is Action.DENY else RuleAction.ALLOWED
            packets_by_rule[tenant_counters.tenant, verdict.rule, verdict.direction, action] += packets
            if verdict.audit_deny is not None:
                packets_by_rule[
                    tenant_counters.tenant, verdict.audit_deny, verdict.direction, RuleAction.WOULD_DENY
                ] += packets
    rules = [
        RuleCount(tenant=tenant, rule=rule, direction=direction, action=action, packets=packets)
        for (tenant, rule, direction, action), packets in packets_by_rule.items()
    ]
    # A stable order for equal counts, so that two calls show the same list.
    rules.sort(key=lambda each: (-each.packets, each.rule, each.action))
    return PolicyCounters(rules=rules, reasons=dict(sorted(reasons.items())))
