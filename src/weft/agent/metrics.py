"""What the agent counts, exposed for Prometheus."""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from weft.agent.observe.rule_counters import MOST_RULES, Counts
from weft.cni.request import Verb

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_VERBS = frozenset(Verb)
_OTHER_RULES = "other"


class PolicyCounts(Collector):
    """The datapath's own counts, as they were when somebody looked last.

    At most `MOST_RULES` rules have series of their own, those that were met first; the rest is summed up as `other`.
    """

    def __init__(self) -> None:
        self._named: dict[str, None] = {}
        self._rules: Sums[tuple[str, str]] = Sums()
        self._reasons: dict[str, int] = {}
        # How many drops were told one by one.
        self.told = 0

    def take(self, counts: Counts) -> None:
        """Show these counts from now on."""
        present = {each.rule for each in counts.rules}
        self._named = {rule: None for rule in self._named if rule in present}
        for each in counts.rules:
            if len(self._named) < MOST_RULES:
                self._named[each.rule] = None
        self._rules = Sums()
        for each in counts.rules:
            self._rules[each.rule if each.rule in self._named else _OTHER_RULES, each.deed] += each.packets
        self._reasons = counts.reasons

    def collect(self) -> Iterator[CounterMetricFamily]:
        rules = CounterMetricFamily(
            "weft_agent_rule_packets",
            "Packets by the rule they met and what it did; for allowed, how often the rule was asked",
            labels=("rule", "deed"),
        )
        for labels, packets in self._rules.items():
            rules.add_metric(labels, packets)
        yield rules
        reasons = CounterMetricFamily(
            "weft_agent_refused_packets", "Packets refused for a reason that is no policy's", labels=("reason",)
        )
        for reason, packets in self._reasons.items():
            reasons.add_metric((reason,), packets)
        yield reasons
        yield CounterMetricFamily(
            "weft_agent_drops_told", "Refused packets told one by one: all of them, or a sample", value=self.told
        )


class Metrics:
    """One registry per agent, so that two in one process do not collide. Gauges are set when someone looks."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._calls = Counter(
            "weft_agent_cni_calls_total",
            "CNI calls by verb, and the code of their refusal or done",
            ("verb", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "weft_agent_cni_call_seconds", "Time to answer a CNI call", ("verb",), buckets=_BUCKETS, registry=registry
        )
        self.attachments = Gauge("weft_agent_attachments", "Attachments by stage", ("stage",), registry=registry)
        self.blocks = Gauge("weft_agent_address_blocks", "Address blocks that this node owns", registry=registry)
        self.peers = Gauge("weft_agent_peers", "Other nodes by whether they are heard", ("state",), registry=registry)
        self.connected = Gauge("weft_agent_store_in_touch", "1 while the store hears this node", registry=registry)
        self.ready = Gauge("weft_agent_ready", "1 while this node is ready", registry=registry)
        self.revision = Gauge("weft_agent_realised_revision", "Revision of the store in force here", registry=registry)
        self.lag = Gauge(
            "weft_agent_reconcile_lag_revisions", "Revisions known and not yet in force", registry=registry
        )
        self.repaired = Gauge(
            "weft_agent_mended", "Deviations of the kernel put right since the start", registry=registry
        )
        self.orchestrator = Gauge(
            "weft_agent_orchestrator_in_touch", "1 while the orchestrator tells of this node's pods", registry=registry
        )
        self.policy = PolicyCounts()
        registry.register(self.policy)

    def observe(self, verb: str, outcome: str, seconds: float) -> None:
        """Count one CNI call. A verb that is none is not repeated: callers must not make series grow."""
        known = verb if verb in _VERBS else "unknown"
        self._calls.labels(known, outcome).inc()
        self._seconds.labels(known).observe(seconds)

    def expose(self) -> bytes:
        """The text of all metrics."""
        return generate_latest(self._registry)
