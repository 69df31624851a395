"""What the agent counts."""

from __future__ import annotations

from weft.agent.metrics import Metrics
from weft.agent.observe.rule_counters import MOST_RULES, Counts, RuleAction, RuleCount
from weft.domain.ids import TenantName


def test_calls_are_counted_by_verb_and_outcome() -> None:
    metrics = Metrics()
    metrics.observe("ADD", "done", 0.004)
    metrics.observe("ADD", "11", 2.0)
    text = metrics.expose().decode()
    assert 'weft_agent_cni_calls_total{outcome="done",verb="ADD"} 1.0' in text
    assert 'weft_agent_cni_calls_total{outcome="11",verb="ADD"} 1.0' in text
    assert 'weft_agent_cni_call_seconds_count{verb="ADD"} 2.0' in text


def test_a_caller_cannot_make_new_series() -> None:
    metrics = Metrics()
    for verb in ("", "nonsense", 'a"b'):
        metrics.observe(verb, "4", 0.001)
    assert 'weft_agent_cni_calls_total{outcome="4",verb="unknown"} 3.0' in metrics.expose().decode()


def counts(*rules: tuple[str, RuleAction, int]) -> Counts:
    return Counts(
        rules=[
            RuleCount(tenant=TenantName("t"), rule=rule, direction="ingress", deed=deed, packets=packets)
            for rule, deed, packets in rules
        ],
        reasons={"weft/spoofed": 4},
    )


def test_packets_are_counted_by_rule_and_by_reason() -> None:
    metrics = Metrics()
    metrics.policy.take(
        counts(("a", RuleAction.DENIED, 7), ("a", RuleAction.DENIED, 1), ("b", RuleAction.WOULD_DENY, 2))
    )
    metrics.policy.told = 3
    text = metrics.expose().decode()
    assert 'weft_agent_rule_packets_total{deed="denied",rule="a"} 8.0' in text
    assert 'weft_agent_rule_packets_total{deed="would-deny",rule="b"} 2.0' in text
    assert 'weft_agent_refused_packets_total{reason="weft/spoofed"} 4.0' in text
    assert "weft_agent_drops_told_total 3.0" in text


def test_rules_cannot_make_series_without_end_and_those_shown_stay() -> None:
    metrics = Metrics()
    first = [(f"r{number}", RuleAction.DENIED, 1) for number in range(MOST_RULES)]
    metrics.policy.take(counts(*first))
    metrics.policy.take(counts(("late", RuleAction.DENIED, 50), ("later", RuleAction.DENIED, 5), *first))
    text = metrics.expose().decode()
    assert 'weft_agent_rule_packets_total{deed="denied",rule="other"} 55.0' in text
    assert text.count("weft_agent_rule_packets_total{") == MOST_RULES + 1
    metrics.policy.take(counts(("late", RuleAction.DENIED, 50), *first[1:]))
    text = metrics.expose().decode()
    assert 'rule="late"} 50.0' in text
    assert 'rule="other"' not in text
