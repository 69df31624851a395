"""What the agent counts."""

from __future__ import annotations

from weft.agent.metrics import Metrics


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
