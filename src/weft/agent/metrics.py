"""What the agent counts, exposed for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weft.cni.request import Verb

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 30.0)
_VERBS = frozenset(Verb)


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
        self.in_touch = Gauge("weft_agent_store_in_touch", "1 while the store hears this node", registry=registry)
        self.ready = Gauge("weft_agent_ready", "1 while this node is ready", registry=registry)
        self.revision = Gauge("weft_agent_realised_revision", "Revision of the store in force here", registry=registry)
        self.lag = Gauge(
            "weft_agent_reconcile_lag_revisions", "Revisions known and not yet in force", registry=registry
        )
        self.mended = Gauge(
            "weft_agent_mended", "Deviations of the kernel put right since the start", registry=registry
        )

    def observe(self, verb: str, outcome: str, seconds: float) -> None:
        """Count one CNI call. A verb that is none is not repeated: callers must not make series grow."""
        known = verb if verb in _VERBS else "unknown"
        self._calls.labels(known, outcome).inc()
        self._seconds.labels(known).observe(seconds)

    def expose(self) -> bytes:
        """The text of all metrics."""
        return generate_latest(self._registry)
