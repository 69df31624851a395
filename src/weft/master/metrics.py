"""Prometheus metrics of netmaster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import tenant_of_namespace
from weft.domain.errors import Invalid
from weft.domain.lifecycle.sync_status import State, state_of
from weft.domain.policy.compile.kube_objects import KubeNamespace
from weft.runtime.admission import AdmissionMetrics

# Seconds. A request is one commit: about a millisecond with SQLite, some with etcd; more means contention or `wait`.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)

# Label values are in snake case, as is usual for Prometheus; REST shows the states in CamelCase, as Kubernetes does.
_STATE_LABELS: Mapping[State, str] = {"Ready": "ready", "NotReady": "not_ready", "Unreachable": "unreachable"}


class Metrics:
    """A registry of its own, so that tests can run two masters in one process."""

    def __init__(self, *collectors: Collector) -> None:
        self._registry = registry = CollectorRegistry()
        for collector in collectors:
            registry.register(collector)
        self.requests = Counter(
            "weft_master_requests_total",
            "REST requests by route and status",
            ("route", "status"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "weft_master_request_duration_seconds",
            "REST request duration by route",
            ("route",),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self.leader = Gauge("weft_master_leader", "1 if this netmaster is the leader", registry=registry)
        # A gauge: the number of informers that fail now, not of errors so far.
        self.informer_errors = Gauge(
            "weft_kube_informer_errors",
            "Kubernetes informers of the leader whose list or watch fails now",
            registry=registry,
        )
        self.admission = AdmissionMetrics()
        registry.register(self.admission)
        self._objects = Gauge("weft_objects", "Stored objects by kind", ("kind",), registry=registry)
        self._failed_closed = Gauge(
            "weft_policies_failed_closed",
            "NetworkPolicies with rules that allow nothing, because they are unreadable, unsupported or too costly",
            registry=registry,
        )
        self._without_tenant = Gauge(
            "weft_kube_namespaces_without_tenant",
            "Namespaces whose Services are not served, because their label io.contiv.tenant is no name",
            registry=registry,
        )
        self._nodes = Gauge(
            "weft_nodes", "Nodes by state (ready, not_ready, unreachable)", ("state",), registry=registry
        )

    def expose(self, cluster: Cluster) -> bytes:
        """The text of all metrics now."""
        for kind in kinds.ALL:
            self._objects.labels(kind.name).set(len(cluster.tables[kind.prefix]))
        self._failed_closed.set(sum(1 for policy in cluster.all(kinds.KUBE_POLICY) if policy.fault))
        self._without_tenant.set(
            sum(1 for namespace in cluster.all(kinds.KUBE_NAMESPACE) if not _has_tenant(namespace))
        )
        states = [state_of(cluster, node.name) for node in cluster.all(kinds.NODE)]
        for state in get_args(State):
            self._nodes.labels(_STATE_LABELS[state]).set(states.count(state))
        return generate_latest(self._registry)


def _has_tenant(namespace: KubeNamespace) -> bool:
    try:
        return bool(tenant_of_namespace(namespace.labels))
    except Invalid:
        return False
