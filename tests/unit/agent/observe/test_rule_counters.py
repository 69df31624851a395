"""Counts by rule, from the numbers that the datapath counts by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.fake_cluster import DEFAULT

from weft.agent.observe.rule_counters import MOST_RULES, Counts, RuleAction, RuleCount, count_rules
from weft.domain.ids import TenantName
from weft.domain.policy.model.rules import Action
from weft.ports.datapath import VerdictCounters

if TYPE_CHECKING:
    from tests.unit.agent.conftest import Policed

DENY = "contiv/default/p/no-81"
IDEA = "contiv/default/idea/no-8080"


def test_rules_are_counted_by_what_they_did_and_would_have_done(policed: Policed) -> None:
    dry = policed.number("weft/default", Action.ALLOW, would=IDEA)
    plain = policed.number("weft/default", Action.ALLOW)
    counters = VerdictCounters(
        tenant=DEFAULT, outcomes={policed.number(DENY): 7, dry: 2, plain: 3, 12345: 99}, reasons={"weft/spoofed": 4}
    )
    counts = count_rules([counters], policed.policies.by_tenant)
    assert [(each.rule, each.deed, each.packets) for each in counts.rules] == [
        (DENY, RuleAction.DENIED, 7),
        ("weft/default", RuleAction.ALLOWED, 5),
        (IDEA, RuleAction.WOULD_DENY, 2),
    ]
    assert counts.reasons == {"weft/spoofed": 4}


def test_what_was_never_met_and_who_is_not_here_is_not_told(policed: Policed) -> None:
    never = VerdictCounters(tenant=DEFAULT, outcomes={policed.number(DENY): 0}, reasons={})
    gone = VerdictCounters(tenant=TenantName("gone"), outcomes={policed.number(DENY): 1}, reasons={"weft/invalid": 1})
    counts = count_rules([never, gone], policed.policies.by_tenant)
    assert counts == Counts(rules=[], reasons={"weft/invalid": 1})


def test_many_rules_are_shortened_to_those_met_most() -> None:
    rules = [
        RuleCount(tenant=DEFAULT, rule=f"r{number}", direction="ingress", deed=RuleAction.DENIED, packets=9)
        for number in range(MOST_RULES + 3)
    ]
    counts = Counts(rules=rules, reasons={}).shortened()
    assert (len(counts.rules), counts.left_out) == (MOST_RULES, 3)
