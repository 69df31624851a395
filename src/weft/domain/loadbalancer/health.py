"""What load balancers ask a node at the `healthCheckNodePort` of a service: whether it has something behind it itself.

With `externalTrafficPolicy: Local` a node leads nobody to another one, so who spreads callers over nodes must know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from weft.domain.ids import NodeName
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice


class Health(NamedTuple):
    """A service with such a port, and how many endpoints of this node would answer for it."""

    namespace: str
    name: str
    local: int


def health_of(service: KubeService, slices: Iterable[KubeSlice], *, node: NodeName) -> Health:
    """Those that are ready count, each once though it may be in several slices."""
    local = {
        endpoint.addresses[0]
        for document in slices
        for endpoint in document.slice.endpoints or ()
        if endpoint.node_name == node and endpoint.addresses and endpoint.conditions.ready is not False
    }
    return Health(service.namespace, service.name, len(local))
