"""The health check of a Service with `externalTrafficPolicy: Local` at its `healthCheckNodePort`.

With that policy a node forwards external connections only to its own endpoints. An external load balancer checks this
port to skip nodes without any.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.domain.ids import NodeName
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice


class Health(NamedTuple):
    """A service with a health check port, and its number of ready endpoints on this node."""

    namespace: str
    name: str
    local: int


def health_of(service: KubeService, slices: Iterable[KubeSlice], *, node: NodeName) -> Health:
    """Count the ready endpoints of a service on this node."""
    # A set, because an endpoint may be in several slices. The API defines absent `ready` as true.
    local = {
        endpoint.addresses[0]
        for document in slices
        for endpoint in document.slice.endpoints or ()
        if endpoint.node_name == node and endpoint.addresses and endpoint.conditions.ready is not False
    }
    return Health(service.namespace, service.name, len(local))
