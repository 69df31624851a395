"""A node says that it answers for a service while one of its own endpoints is ready."""

from __future__ import annotations

from weft.domain.ids import DEFAULT_TENANT, NodeName
from weft.domain.loadbalancer.health import Health, health_of
from weft.domain.loadbalancer.kube_objects import (
    Conditions,
    DeclaredService,
    EndpointSlice,
    KubeService,
    KubeSlice,
    SliceEndpoint,
)

SERVICE = KubeService(tenant=DEFAULT_TENANT, namespace="shop", name="web", service=DeclaredService())


def piece(*endpoints: SliceEndpoint) -> KubeSlice:
    value = EndpointSlice(address_type="IPv4", endpoints=endpoints)
    return KubeSlice(tenant=DEFAULT_TENANT, namespace="shop", service_name="web", name="web-1", slice=value)


def endpoint(address: str, *, node: str = "one", ready: bool | None = True) -> SliceEndpoint:
    return SliceEndpoint(addresses=(address,), node_name=node, conditions=Conditions(ready=ready, serving=True))


def local(*slices: KubeSlice) -> int:
    found = health_of(SERVICE, slices, node=NodeName("one"))
    assert found == Health("shop", "web", found.local)
    return found.local


def test_endpoints_of_the_node_that_are_ready_count_once() -> None:
    assert local() == 0
    assert local(piece(endpoint("10.0.0.1"), endpoint("10.0.0.2", ready=None)), piece(endpoint("10.0.0.1"))) == 2


def test_others_do_not_count() -> None:
    """Those of other nodes, and those that only serve while they end."""
    assert local(piece(endpoint("10.0.0.1", node="two"), endpoint("10.0.0.2", ready=False))) == 0
