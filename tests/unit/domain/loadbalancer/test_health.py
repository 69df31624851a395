"""The health check counts the ready endpoints of the own node."""

from __future__ import annotations

from weft.domain.ids import DEFAULT_TENANT, NodeName
from weft.domain.loadbalancer.health import Health, health_of
from weft.domain.loadbalancer.kube_objects import (
    Conditions,
    EndpointSlice,
    KubeService,
    KubeSlice,
    ServiceObject,
    SliceEndpoint,
)

SERVICE = KubeService(tenant=DEFAULT_TENANT, namespace="shop", name="web", service=ServiceObject())


def slice_of(*endpoints: SliceEndpoint) -> KubeSlice:
    value = EndpointSlice(address_type="IPv4", endpoints=endpoints)
    return KubeSlice(tenant=DEFAULT_TENANT, namespace="shop", service_name="web", name="web-1", slice=value)


def endpoint(address: str, *, node: str = "one", ready: bool | None = True) -> SliceEndpoint:
    return SliceEndpoint(addresses=(address,), node_name=node, conditions=Conditions(ready=ready, serving=True))


def local(*slices: KubeSlice) -> int:
    found = health_of(SERVICE, slices, node=NodeName("one"))
    assert found == Health("shop", "web", found.local)
    return found.local


def test_ready_endpoints_of_the_node_count_once() -> None:
    assert local() == 0
    assert local(slice_of(endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=None)), slice_of(endpoint("10.0.0.1"))) == 2


def test_other_endpoints_do_not_count() -> None:
    """Endpoints of other nodes, and terminating ones that still serve."""
    assert local(slice_of(endpoint("10.0.0.1", node="two"), endpoint("10.0.0.2", ready=False))) == 0
