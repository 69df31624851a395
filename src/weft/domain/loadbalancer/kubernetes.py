"""Kubernetes' Service and its EndpointSlices -> the same fronts and pools as Contiv's services.

Two views of one service: pods ask at its own addresses, and at the outer ones too; others ask at outer addresses and
node ports, and come by the host. At which outer addresses a service may be asked is for `outer` to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.loadbalancer.kube_objects import (
    HEADLESS,
    AffinityConfig,
    DeclaredService,
    EndpointSlice,
    ServicePort,
    SliceEndpoint,
)
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool, Target, pool_of
from weft.domain.policy.model.protocols import protocol_number
from weft.domain.policy.model.ranges import parse_cidr


def pools_for_pods(
    service: DeclaredService, slices: Iterable[EndpointSlice], *, node: str, outer: Iterable[Address]
) -> dict[FrontendKey, Pool]:
    """Where pods of a node ask. To pods, an outer address is as good as one of the cluster: it has all backends."""
    listed, own_only = tuple(slices), service.spec.internal_traffic_policy == "Local"
    pools = _pools(service, listed, own_addresses(service), node=node if own_only else "")
    return pools | _pools(service, listed, outer, node="")


def pools_for_outside(
    service: DeclaredService,
    slices: Iterable[EndpointSlice],
    *,
    node: str,
    outer: Iterable[Address],
    doors: Iterable[Address],
) -> dict[FrontendKey, Pool]:
    """Where others ask by the host: at the doors for node ports, and at outer addresses where that is a difference."""
    listed, own_only = tuple(slices), service.spec.external_traffic_policy == "Local"
    place = node if own_only else ""
    pools = _pools(service, listed, doors, node=place, at_node_ports=True)
    if own_only:
        apart = _pools(service, listed, outer, node=place)
        pools |= {front._replace(outside=True): pool for front, pool in apart.items()}
    return pools


def own_addresses(service: DeclaredService) -> list[Address]:
    """Those that the cluster has given to the service; `Invalid` when one is none."""
    texts = service.spec.cluster_ips
    return [parse_address(text, field="spec.clusterIPs") for text in texts if text and text != HEADLESS]


def wanted_addresses(service: DeclaredService) -> list[Address]:
    """The outer ones that the service asks for, or was given by a load balancer; `Invalid` when one is none."""
    asked = [parse_address(text, field="spec.externalIPs") for text in service.spec.external_ips if text]
    return asked + _given_addresses(service)


def _given_addresses(service: DeclaredService) -> list[Address]:
    texts = (ingress.ip for ingress in service.status.load_balancer.ingress)
    return [parse_address(text, field="status.loadBalancer") for text in texts if text]


def sources_at(service: DeclaredService, address: Address) -> tuple[Range, ...] | None:
    """From where the service may be asked at an outer address; None: from anywhere. `Invalid` when that is unclear."""
    texts = service.spec.load_balancer_source_ranges
    ranges = [parse_cidr(text.strip(), field="spec.loadBalancerSourceRanges") for text in texts]
    if not ranges or address not in _given_addresses(service):
        return None
    return tuple(each for each in ranges if each.family == address.family)


def node_ports(service: DeclaredService) -> Iterator[tuple[int, int]]:
    """Protocol and number of each."""
    return ((protocol_number(port.protocol), port.node_port) for port in service.spec.ports if port.node_port)


def is_outward(service: DeclaredService) -> bool:
    """Whether it asks to be reached from outside the cluster."""
    spec = service.spec
    return bool(spec.external_ips or service.status.load_balancer.ingress) or any(node_ports(service))


def _pools(
    service: DeclaredService,
    slices: tuple[EndpointSlice, ...],
    addresses: Iterable[Address],
    *,
    node: str,
    at_node_ports: bool = False,
) -> dict[FrontendKey, Pool]:
    """Every port at every address; with a node, only its own backends share the connections."""
    pools: dict[FrontendKey, Pool] = {}
    for address in addresses:
        for port in service.spec.ports:
            if number := port.node_port if at_node_ports else port.port:
                targets = _targets(port, slices, family=address.family, node=node)
                front = FrontendKey(address, protocol_number(port.protocol), number)
                pools[front] = pool_of(targets, affinity=_affinity(service))
    return pools


def _targets(port: ServicePort, slices: tuple[EndpointSlice, ...], *, family: int, node: str) -> Iterable[Target]:
    """Those that are ready; when none is, those that still serve while they end."""
    ready: list[Target] = []
    ending: list[Target] = []
    for found, target_port in _endpoints(port, slices, family=family):
        if node and found.node_name != node:
            continue
        target = Target(parse_address(found.addresses[0], field="endpoints.addresses", family=family), target_port)
        if found.conditions.ready is not False:
            ready.append(target)
        elif found.conditions.serving and found.conditions.terminating:
            ending.append(target)
    return ready or ending


def _endpoints(
    port: ServicePort, slices: tuple[EndpointSlice, ...], *, family: int
) -> Iterator[tuple[SliceEndpoint, int]]:
    for each in slices:
        if each.address_type != f"IPv{family}":
            continue
        for offered in each.ports or ():
            if (offered.name, offered.protocol) == (port.name, port.protocol) and offered.port:
                yield from ((endpoint, offered.port) for endpoint in each.endpoints or () if endpoint.addresses)


def _affinity(service: DeclaredService) -> int:
    if service.spec.session_affinity == "None":
        return 0
    config = service.spec.session_affinity_config or AffinityConfig()
    return config.client_ip.timeout_seconds
