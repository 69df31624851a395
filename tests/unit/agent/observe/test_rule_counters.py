"""Per-rule counters, from the verdict counters of the datapath."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.fake_cluster import DEFAULT

from weft.agent.observe.rule_counters import MAX_RULE_SERIES, PolicyCounters, RuleAction, RuleCount, count_rules
from weft.domain.ids import TenantName
from weft.domain.policy.model.rules import Action
from weft.ports.datapath import VerdictCounters

if TYPE_CHECKING:
    from tests.unit.agent.conftest import Policed

DENY = "contiv/default/p/no-81"
IDEA = "contiv/default/idea/no-8080"


def test_packets_are_counted_by_rule_and_action_including_audit(policed: Policed) -> None:
    dry = policed.number("weft/default", Action.ALLOW, audit_deny=IDEA)
    plain = policed.number("weft/default", Action.ALLOW)
    counters = VerdictCounters(
        tenant=DEFAULT, verdicts={policed.number(DENY): 7, dry: 2, plain: 3, 12345: 99}, reasons={"weft/spoofed": 4}
    )
    counts = count_rules([counters], policed.policies.by_tenant)
    assert [(each.rule, each.action, each.packets) for each in counts.rules] == [
        (DENY, RuleAction.DENIED, 7),
        ("weft/default", RuleAction.ALLOWED, 5),
        (IDEA, RuleAction.WOULD_DENY, 2),
    ]
    assert counts.reasons == {"weft/spoofed": 4}


def test_rules_without_packets_and_absent_tenants_are_left_out(policed: Policed) -> None:
    never = VerdictCounters(tenant=DEFAULT, verdicts={policed.number(DENY): 0}, reasons={})
    gone = VerdictCounters(tenant=TenantName("gone"), verdicts={policed.number(DENY): 1}, reasons={"weft/invalid": 1})
    counts = count_rules([never, gone], policed.policies.by_tenant)
    assert counts == PolicyCounters(rules=[], reasons={"weft/invalid": 1})


def test_a_long_list_is_truncated_to_the_rules_with_most_packets() -> None:
    rules = [
        RuleCount(tenant=DEFAULT, rule=f"r{number}", direction="ingress", action=RuleAction.DENIED, packets=9)
        for number in range(MAX_RULE_SERIES + 3)
    ]
    counts = PolicyCounters(rules=rules, reasons={}).shortened()
    assert (len(counts.rules), counts.truncated) == (MAX_RULE_SERIES, 3)
