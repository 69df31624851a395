"""Compiles a Kubernetes Service and its EndpointSlices to frontends and backend pools.

A service has two sets of pools. Pods use the internal ones: at the cluster IPs and also at the external IPs. Traffic
from outside the tenant comes through the host and uses the external ones: at external IPs and node ports. Which
external IPs a service may have is decided by `external_ips`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.loadbalancer.kube_objects import (
    HEADLESS,
    AffinityConfig,
    EndpointSlice,
    ServiceObject,
    ServicePort,
    SliceEndpoint,
)
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool, Target, pool_of
from weft.domain.policy.model.protocols import protocol_number
from weft.domain.policy.model.ranges import address_set, parse_cidr


def internal_pools(
    service: ServiceObject, slices: Iterable[EndpointSlice], *, node: str, external_ips: Iterable[Address]
) -> dict[FrontendKey, Pool]:
    """Return the pools for pods of a node. At an external IP they get all backends, whatever the traffic policy."""
    all_slices, local_only = tuple(slices), service.spec.internal_traffic_policy == "Local"
    pools = _pools(service, all_slices, cluster_addresses(service), node=node if local_only else "")
    return pools | _pools(service, all_slices, external_ips, node="")


def external_pools(
    service: ServiceObject,
    slices: Iterable[EndpointSlice],
    *,
    node: str,
    external_ips: Iterable[Address],
    nodeport_vips: Iterable[Address],
) -> dict[FrontendKey, Pool]:
    """Return the pools for traffic through the host: at the NodePort VIPs, and at external IPs where pools differ."""
    all_slices, local_only = tuple(slices), service.spec.external_traffic_policy == "Local"
    # An empty node means no restriction.
    backend_node = node if local_only else ""
    pools = _pools(service, all_slices, nodeport_vips, node=backend_node, at_node_ports=True)
    # With `externalTrafficPolicy: Cluster` the internal pools at external IPs serve external traffic too.
    if local_only:
        local_pools = _pools(service, all_slices, external_ips, node=backend_node)
        pools |= {frontend._replace(external=True): pool for frontend, pool in local_pools.items()}
    return pools


def cluster_addresses(service: ServiceObject) -> list[Address]:
    """Return the cluster IPs of the service; `Invalid` if one is not an address."""
    # A headless Service has the single "address" `None`.
    texts = service.spec.cluster_ips
    return [parse_address(text, field="spec.clusterIPs") for text in texts if text and text != HEADLESS]


def requested_external_ips(service: ServiceObject) -> list[Address]:
    """Return `externalIPs` and the load balancer's ingress IPs; `Invalid` if one is not an address."""
    external_ips = [parse_address(text, field="spec.externalIPs") for text in service.spec.external_ips if text]
    return external_ips + _load_balancer_ips(service)


def _load_balancer_ips(service: ServiceObject) -> list[Address]:
    texts = (ingress.ip for ingress in service.status.load_balancer.ingress)
    return [parse_address(text, field="status.loadBalancer") for text in texts if text]


def allowed_sources(service: ServiceObject, address: Address) -> tuple[Range, ...] | None:
    """Return `loadBalancerSourceRanges` for an external IP; None if any source is allowed. May raise `Invalid`."""
    texts = service.spec.load_balancer_source_ranges
    # Parsed in any case: a range that cannot be parsed must not be taken for "any source".
    ranges = [parse_cidr(text.strip(), field="spec.loadBalancerSourceRanges") for text in texts]
    if not ranges or address not in _load_balancer_ips(service):
        return None
    # Without overlaps: an nft set has no two ranges with a common address.
    return tuple(address_set(source for source in ranges if source.family == address.family).ranges)


def node_ports(service: ServiceObject) -> Iterator[tuple[int, int]]:
    """Return protocol and number of each node port."""
    return ((protocol_number(port.protocol), port.node_port) for port in service.spec.ports if port.node_port)


def is_externally_reachable(service: ServiceObject) -> bool:
    """Return whether the service has external IPs, a load balancer or node ports."""
    spec = service.spec
    return bool(spec.external_ips or service.status.load_balancer.ingress) or any(node_ports(service))


def _pools(
    service: ServiceObject,
    slices: tuple[EndpointSlice, ...],
    addresses: Iterable[Address],
    *,
    node: str,
    at_node_ports: bool = False,
) -> dict[FrontendKey, Pool]:
    """Return the pool of every port at every address; with a node, only with its own backends."""
    pools: dict[FrontendKey, Pool] = {}
    for address in addresses:
        for port in service.spec.ports:
            if number := port.node_port if at_node_ports else port.port:
                targets = _targets(port, slices, family=address.family, node=node)
                frontend = FrontendKey(address, protocol_number(port.protocol), number)
                sources = None if at_node_ports else allowed_sources(service, address)
                pools[frontend] = pool_of(targets, affinity=_affinity(service), sources=sources)
    return pools


def _targets(port: ServicePort, slices: tuple[EndpointSlice, ...], *, family: int, node: str) -> Iterable[Target]:
    """Return the ready endpoints; if there are none, those that still serve while they terminate (KEP-1669)."""
    ready: list[Target] = []
    terminating: list[Target] = []
    for endpoint, target_port in _endpoints(port, slices, family=family):
        # `Local` never falls back to other nodes, even without any local endpoint.
        if node and endpoint.node_name != node:
            continue
        target = Target(parse_address(endpoint.addresses[0], field="endpoints.addresses", family=family), target_port)
        if endpoint.conditions.ready is not False:
            ready.append(target)
        elif endpoint.conditions.serving and endpoint.conditions.terminating:
            terminating.append(target)
    # Keeps connections working while the last pods of a rollout terminate.
    return ready or terminating


def _endpoints(
    port: ServicePort, slices: tuple[EndpointSlice, ...], *, family: int
) -> Iterator[tuple[SliceEndpoint, int]]:
    for endpoint_slice in slices:
        if endpoint_slice.address_type != f"IPv{family}":
            continue
        # A slice refers to the service's port by name, as the target port may differ between pods.
        for slice_port in endpoint_slice.ports or ():
            if (slice_port.name, slice_port.protocol) == (port.name, port.protocol) and slice_port.port:
                endpoints = endpoint_slice.endpoints or ()
                yield from ((endpoint, slice_port.port) for endpoint in endpoints if endpoint.addresses)


def _affinity(service: ServiceObject) -> int:
    if service.spec.session_affinity == "None":
        return 0
    config = service.spec.session_affinity_config or AffinityConfig()
    return config.client_ip.timeout_seconds
