"""Prometheus metrics of the agent."""

from __future__ import annotations

from collections import Counter as Sums
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from weft.agent.observe.rule_counters import MAX_RULE_SERIES, PolicyCounters
from weft.cni.request import Verb
from weft.runtime.admission import AdmissionMetrics

# An ADD takes milliseconds; the upper buckets show a busy machine or an unreachable store.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_VERBS = frozenset(Verb)
_OTHER_RULES = "other"


class DatapathCounters(Collector):
    """Counters that live outside this process or elsewhere in it, as they were at the last scrape.

    At most `MAX_RULE_SERIES` rules get series of their own, first come first served; the rest are summed as `other`.
    """

    def __init__(self) -> None:
        # A dict keeps insertion order: a rule that has a series keeps it for as long as the rule exists.
        self._named: dict[str, None] = {}
        self._rules: Sums[tuple[str, str]] = Sums()
        self._reasons: dict[str, int] = {}
        # Dropped packets that were logged one by one.
        self.drop_events = 0
        # Differences between kernel and desired state that were repaired.
        self.drift_repairs = 0

    def update_policy(self, counters: PolicyCounters) -> None:
        """Expose these counters from now on."""
        present = {counter.rule for counter in counters.rules}
        self._named = {rule: None for rule in self._named if rule in present}
        for counter in counters.rules:
            if len(self._named) < MAX_RULE_SERIES:
                self._named[counter.rule] = None
        self._rules = Sums()
        for counter in counters.rules:
            rule = counter.rule if counter.rule in self._named else _OTHER_RULES
            self._rules[rule, counter.action] += counter.packets
        self._reasons = counters.reasons

    def collect(self) -> Iterator[CounterMetricFamily]:
        # CounterMetricFamily appends `_total` to each name.
        rules = CounterMetricFamily(
            "weft_policy_rule_packets",
            "Packets by policy rule and action; for `allowed`: policy evaluations, one per connection and epoch",
            labels=("rule", "action"),
        )
        for labels, packets in self._rules.items():
            rules.add_metric(labels, packets)
        yield rules
        reasons = CounterMetricFamily(
            "weft_dropped_packets",
            "Packets dropped by the datapath for a reason that is not a policy verdict",
            labels=("reason",),
        )
        for reason, packets in self._reasons.items():
            reasons.add_metric((reason,), packets)
        yield reasons
        yield CounterMetricFamily(
            "weft_drop_events", "Dropped packets that were logged; a sample at high rates", value=self.drop_events
        )
        yield CounterMetricFamily(
            "weft_drift_repairs", "Differences between kernel and desired state repaired", value=self.drift_repairs
        )


# The counters of netdns that are exposed: what it reports beside them would make series that nobody has documented.
_DNS_RESULTS = ("found", "absent", "invalid", "refused", "forwarded", "failed")
_DNS_LIMITS = {"limited": "client-queries", "connections_limited": "client-connections"}


class DnsCounters(Collector):
    """Counters of netdns as of its last report, at most half a minute old."""

    def __init__(self) -> None:
        self.statistics: Mapping[str, int] = {}

    def collect(self) -> Iterator[CounterMetricFamily]:
        queries = CounterMetricFamily("weft_dns_queries", "DNS queries of workloads by result", labels=("result",))
        for result in _DNS_RESULTS:
            queries.add_metric((result,), self.statistics.get(result, 0))
        yield queries
        limited = CounterMetricFamily(
            "weft_dns_limited",
            "DNS queries and TCP connections of workloads that exceeded a client's share",
            labels=("limit",),
        )
        for name, limit in _DNS_LIMITS.items():
            limited.add_metric((limit,), self.statistics.get(name, 0))
        yield limited


class Metrics:
    """The metrics of one agent. Gauges are set at each scrape."""

    def __init__(self, *collectors: Collector) -> None:
        # A registry of its own: two agents in one process, as in tests, must not share the global one.
        self._registry = registry = CollectorRegistry()
        self._cni_requests = Counter(
            "weft_agent_cni_requests_total",
            "CNI requests by verb and result: done, or the CNI error code",
            ("verb", "result"),
            registry=registry,
        )
        self._cni_seconds = Histogram(
            "weft_agent_cni_request_duration_seconds",
            "Time to answer a CNI request",
            ("verb",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.attachments = Gauge("weft_agent_attachments", "Attachments by stage", ("stage",), registry=registry)
        self.damaged_log_lines = Gauge(
            "weft_agent_attachment_log_damaged_lines",
            "Lines of the attachment log that were damaged, missing or repeated at the last start",
            registry=registry,
        )
        self.blocks = Gauge("weft_agent_address_blocks", "IPAM blocks owned by this node", registry=registry)
        self.uncovered_endpoints = Gauge(
            "weft_agent_uncovered_endpoints",
            "Endpoints that are ignored: no block of their node and no claim of theirs covers their address",
            registry=registry,
        )
        self.peers = Gauge("weft_agent_peers", "Peers by liveness", ("state",), registry=registry)
        self.store_connected = Gauge("weft_agent_store_connected", "1 if connected to the store", registry=registry)
        self.kube_api_connected = Gauge(
            "weft_agent_kube_api_connected", "1 if the watch of this node's pods works", registry=registry
        )
        self.ready = Gauge("weft_agent_ready", "1 if this node is ready", registry=registry)
        self.realized_revision = Gauge(
            "weft_realized_revision", "Store revision that the datapath enforces", registry=registry
        )
        self.lag = Gauge(
            "weft_agent_reconcile_lag_revisions", "Store revisions received and not yet applied", registry=registry
        )
        self.dns_in_sync = Gauge("weft_dns_in_sync", "1 if netdns has all zones", registry=registry)
        self.dns_left_out = Gauge(
            "weft_dns_records_left_out", "DNS records not served: invalid, or too many of one object", registry=registry
        )
        self.dns = DnsCounters()
        registry.register(self.dns)
        self.datapath = DatapathCounters()
        self.admission = AdmissionMetrics()
        for collector in (self.datapath, self.admission, *collectors):
            registry.register(collector)

    def observe(self, verb: str, result: str, seconds: float) -> None:
        """Count one CNI request."""
        # The verb comes from the caller: an unbounded label value would let it create series without end.
        known = verb if verb in _VERBS else "unknown"
        self._cni_requests.labels(known, result).inc()
        self._cni_seconds.labels(known).observe(seconds)

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
