"""Rule precedence: tiers, priorities and actions."""

from __future__ import annotations

from itertools import permutations

import pytest

from weft.domain.policy.engine.decide import decide
from weft.domain.policy.model.rules import Action, Direction, FlowRule, RuleId, Tier

ADMIN, GROUP, NAMESPACE, BASELINE = Tier
DENY, ALLOW, PASS = Action


def rule(tier: Tier, action: Action, priority: int = 0, name: str = "") -> FlowRule:
    return FlowRule(
        id=RuleId(name or f"{tier.name}-{action}-{priority}"),
        tier=tier,
        direction=Direction.INGRESS,
        action=action,
        priority=priority,
    )


def decider(*rules: FlowRule) -> str:
    """The rule that decides when all of them match, in whatever order they were added."""
    found = {
        decide(sorted(order, key=lambda each: each.order), lambda _: True, direction=Direction.INGRESS).id
        for order in permutations(rules)
    }
    assert len(found) == 1
    return found.pop()


def test_without_a_matching_rule_the_default_allows() -> None:
    assert decider() == "weft/default"
    assert decider(rule(ADMIN, PASS), rule(NAMESPACE, PASS)) == "weft/default"
    assert decide([rule(ADMIN, DENY)], lambda _: False, direction=Direction.EGRESS).action is ALLOW


@pytest.mark.parametrize("action", [ALLOW, DENY])
def test_the_admin_tier_is_final(action: Action) -> None:
    others = [rule(tier, other) for tier in (GROUP, NAMESPACE, BASELINE) for other in (ALLOW, DENY)][:4]
    assert decider(rule(ADMIN, action), *others) == f"ADMIN-{action}-0"


def test_pass_continues_with_the_next_tier() -> None:
    assert decider(rule(ADMIN, PASS, 5), rule(ADMIN, DENY, 1), rule(NAMESPACE, ALLOW)) == "NAMESPACE-allow-0"
    assert decider(rule(ADMIN, PASS), rule(BASELINE, DENY)) == "BASELINE-deny-0"


def test_contiv_and_network_policies_on_one_workload_must_both_allow() -> None:
    assert decider(rule(GROUP, ALLOW), rule(NAMESPACE, DENY)) == "NAMESPACE-deny-0"
    assert decider(rule(GROUP, DENY), rule(NAMESPACE, ALLOW)) == "GROUP-deny-0"
    assert decider(rule(GROUP, ALLOW), rule(NAMESPACE, ALLOW)) == "NAMESPACE-allow-0"
    assert decider(rule(GROUP, ALLOW)) == "GROUP-allow-0"


def test_the_baseline_applies_only_if_no_other_tier_decided() -> None:
    assert decider(rule(GROUP, ALLOW), rule(BASELINE, DENY)) == "GROUP-allow-0"
    assert decider(rule(NAMESPACE, ALLOW), rule(BASELINE, DENY)) == "NAMESPACE-allow-0"
    assert decider(rule(BASELINE, DENY)) == "BASELINE-deny-0"


def test_within_a_tier_priority_then_deny_then_the_name() -> None:
    assert decider(rule(GROUP, DENY, 1), rule(GROUP, ALLOW, 2)) == "GROUP-allow-2"
    assert decider(rule(GROUP, DENY, 2), rule(GROUP, ALLOW, 2)) == "GROUP-deny-2"
    assert decider(rule(GROUP, DENY, 2, "b"), rule(GROUP, DENY, 2, "a")) == "a"


@pytest.mark.parametrize("priority", [1, 100, 2**31 - 1, 2**31, 2**32, 2**63, 2**64])
def test_cve_2026_25804_priorities_have_no_limit_to_overflow(priority: int) -> None:
    assert decider(rule(GROUP, ALLOW, priority), rule(GROUP, DENY, priority - 1)) == f"GROUP-allow-{priority}"
    assert decider(rule(GROUP, DENY, priority), rule(GROUP, ALLOW, priority - 1)) == f"GROUP-deny-{priority}"
    assert decider(rule(GROUP, ALLOW, priority), rule(NAMESPACE, DENY, -priority)) == f"NAMESPACE-deny-{-priority}"
