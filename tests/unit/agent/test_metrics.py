"""The metrics of the agent: names, labels and bounds."""

from __future__ import annotations

from weft.agent.metrics import Metrics
from weft.agent.observe.rule_counters import MAX_RULE_SERIES, PolicyCounters, RuleAction, RuleCount
from weft.domain.ids import TenantName


def test_cni_requests_are_counted_by_verb_and_result() -> None:
    metrics = Metrics()
    metrics.observe("ADD", "done", 0.004)
    metrics.observe("ADD", "11", 2.0)
    text = metrics.expose().decode()
    assert 'weft_agent_cni_requests_total{result="done",verb="ADD"} 1.0' in text
    assert 'weft_agent_cni_requests_total{result="11",verb="ADD"} 1.0' in text
    assert 'weft_agent_cni_request_duration_seconds_count{verb="ADD"} 2.0' in text


def test_an_unknown_verb_creates_no_series() -> None:
    metrics = Metrics()
    for verb in ("", "nonsense", 'a"b'):
        metrics.observe(verb, "4", 0.001)
    assert 'weft_agent_cni_requests_total{result="4",verb="unknown"} 3.0' in metrics.expose().decode()


def policy_counters(*rules: tuple[str, RuleAction, int]) -> PolicyCounters:
    return PolicyCounters(
        rules=[
            RuleCount(tenant=TenantName("t"), rule=rule, direction="ingress", action=action, packets=packets)
            for rule, action, packets in rules
        ],
        reasons={"weft/spoofed": 4},
    )


def test_packets_are_counted_by_rule_and_by_drop_reason() -> None:
    metrics = Metrics()
    metrics.datapath.update_policy(
        policy_counters(("a", RuleAction.DENIED, 7), ("a", RuleAction.DENIED, 1), ("b", RuleAction.WOULD_DENY, 2))
    )
    metrics.datapath.drop_events = 3
    metrics.datapath.drift_repairs = 2
    text = metrics.expose().decode()
    assert 'weft_policy_rule_packets_total{action="denied",rule="a"} 8.0' in text
    assert 'weft_policy_rule_packets_total{action="would-deny",rule="b"} 2.0' in text
    assert 'weft_dropped_packets_total{reason="weft/spoofed"} 4.0' in text
    assert "weft_drop_events_total 3.0" in text
    assert "weft_drift_repairs_total 2.0" in text
    assert "# TYPE weft_drift_repairs_total counter" in text


def test_the_number_of_rule_series_is_bounded_and_existing_series_stay() -> None:
    metrics = Metrics()
    first = [(f"r{number}", RuleAction.DENIED, 1) for number in range(MAX_RULE_SERIES)]
    metrics.datapath.update_policy(policy_counters(*first))
    metrics.datapath.update_policy(
        policy_counters(("late", RuleAction.DENIED, 50), ("later", RuleAction.DENIED, 5), *first)
    )
    text = metrics.expose().decode()
    assert 'weft_policy_rule_packets_total{action="denied",rule="other"} 55.0' in text
    assert text.count("weft_policy_rule_packets_total{") == MAX_RULE_SERIES + 1
    metrics.datapath.update_policy(policy_counters(("late", RuleAction.DENIED, 50), *first[1:]))
    text = metrics.expose().decode()
    assert 'rule="late"} 50.0' in text
    assert 'rule="other"' not in text


def test_counters_of_netdns_are_exposed_and_no_others() -> None:
    metrics = Metrics()
    metrics.dns_left_out.set(3)
    metrics.dns.statistics = {"found": 7, "limited": 2, "connections_limited": 1, "surprise": 9}
    text = metrics.expose().decode()
    assert 'weft_dns_queries_total{result="found"} 7.0' in text
    assert 'weft_dns_queries_total{result="failed"} 0.0' in text
    assert 'weft_dns_limited_total{limit="client-queries"} 2.0' in text
    assert 'weft_dns_limited_total{limit="client-connections"} 1.0' in text
    assert "weft_dns_records_left_out 3.0" in text
    assert "surprise" not in text
