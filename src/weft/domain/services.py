"""Backends of services: the endpoints whose labels contain all selectors of a service (W22, O20)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.selectors import parse_pairs


def providers(cluster: Cluster, service: model.Service) -> Iterator[model.Endpoint]:
    """The endpoints of the tenant whose labels contain all selectors of the service."""
    # Computed, not stored: an endpoint that is deleted leaves no reference behind (W15).
    selector = parse_pairs(service.selectors)
    for network in cluster.networks(service.tenant):
        for endpoint in cluster.endpoints(network.key):
            # An endpoint without labels matches no selector, which saves most comparisons.
            if endpoint.labels and selector.matches(endpoint.labels):
                yield endpoint


def services_of(cluster: Cluster, endpoint: model.Endpoint) -> Iterator[model.Service]:
    """The services of which an endpoint is a backend."""
    for service in cluster.all(kinds.SERVICE, endpoint.tenant):
        if endpoint.labels and parse_pairs(service.selectors).matches(endpoint.labels):
            yield service
