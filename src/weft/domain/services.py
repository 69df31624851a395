"""Service + endpoints -> who provides it. One rule, containment, whichever of the two came first (W22, O20)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.selectors import parse_pairs


def providers(cluster: Cluster, service: model.Service) -> Iterator[model.Endpoint]:
    """The endpoints of the tenant whose labels contain all the service's selectors.

    Computed, not kept: an endpoint that goes takes nothing with it that could be left behind (W15).
    """
    selector = parse_pairs(service.selectors)
    for network in cluster.networks(service.tenant):
        for endpoint in cluster.endpoints(network.key):
            if endpoint.labels and selector.matches(endpoint.labels):
                yield endpoint


def services_of(cluster: Cluster, endpoint: model.Endpoint) -> Iterator[model.Service]:
    """The services an endpoint provides for."""
    for service in cluster.all(kinds.SERVICE, endpoint.tenant):
        if endpoint.labels and parse_pairs(service.selectors).matches(endpoint.labels):
            yield service
