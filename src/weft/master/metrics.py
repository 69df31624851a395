"""What netmaster counts, exposed for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weft.domain import kinds
from weft.domain.cluster import Cluster

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Metrics:
    """One registry per process part, so that two masters in one process do not collide."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "weft_master_requests_total",
            "REST requests by route and status",
            ("route", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "weft_master_request_seconds",
            "Time to answer, by route",
            ("route",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self.leader = Gauge("weft_master_leader", "1 while this netmaster leads", registry=registry)
        self._objects = Gauge("weft_objects", "Objects by kind", ("kind",), registry=registry)
        self._nodes = Gauge("weft_nodes", "Nodes by whether they are heard", ("state",), registry=registry)

    def expose(self, cluster: Cluster) -> bytes:
        """The text of all metrics now."""
        for kind in kinds.ALL:
            self._objects.labels(kind.name).set(len(cluster.tables[kind.prefix]))
        silent = sum(1 for node in cluster.all(kinds.NODE) if cluster.is_silent(node.name))
        self._nodes.labels("silent").set(silent)
        self._nodes.labels("alive").set(len(cluster.tables[kinds.NODE.prefix]) - silent)
        return generate_latest(self._registry)
