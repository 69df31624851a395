"""What netmaster counts, exposed for Prometheus."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.lifecycle.sync_status import State, state_of

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
        self.untold = Gauge(
            "weft_master_orchestrator_faults",
            "Kinds of objects that the orchestrator does not tell the leader of now",
            registry=registry,
        )
        self._objects = Gauge("weft_objects", "Objects by kind", ("kind",), registry=registry)
        self._nodes = Gauge("weft_nodes", "Nodes by state: alive, not ready, silent", ("state",), registry=registry)

    def expose(self, cluster: Cluster) -> bytes:
        """The text of all metrics now."""
        for kind in kinds.ALL:
            self._objects.labels(kind.name).set(len(cluster.tables[kind.prefix]))
        states = [state_of(cluster, node.name) for node in cluster.all(kinds.NODE)]
        for state in get_args(State):
            self._nodes.labels(state).set(states.count(state))
        return generate_latest(self._registry)
