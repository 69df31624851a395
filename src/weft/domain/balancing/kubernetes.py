"""Kubernetes' Service and its EndpointSlices -> the same fronts and pools as Contiv's services.

Two views of one service: pods ask at its own addresses, and at the outer ones too; the host is asked at outer addresses
and node ports. Outer addresses count only inside the ranges that the cluster's owner allows, so that no service takes
an address that is not its own (CVE-2020-8554).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.domain.addresses import Address, Range, parse_address
from weft.domain.balancing.kube_objects import (
    HEADLESS,
    AffinityConfig,
    EndpointSlice,
    Service,
    ServicePort,
    SliceEndpoint,
)
from weft.domain.balancing.parts import Front
from weft.domain.balancing.table import Pool, Target, pool_of
from weft.domain.policy.protocols import protocol_number


def pools_for_pods(
    service: Service, slices: Iterable[EndpointSlice], *, node: str, allowed: Iterable[Range]
) -> dict[Front, Pool]:
    """Where pods of a node ask. To pods, an outer address is as good as one of the cluster: it has all backends."""
    listed, own_only = tuple(slices), service.spec.internal_traffic_policy == "Local"
    pools = _pools(service, listed, _own_addresses(service), node=node if own_only else "")
    return pools | _pools(service, listed, _outer_addresses(service, allowed), node="")


def pools_for_host(
    service: Service,
    slices: Iterable[EndpointSlice],
    *,
    node: str,
    addresses: Iterable[Address],
    allowed: Iterable[Range],
) -> dict[Front, Pool]:
    """Where a node is asked from outside: at outer addresses, and at the node ports of its own addresses."""
    listed, place = tuple(slices), node if service.spec.external_traffic_policy == "Local" else ""
    pools = _pools(service, listed, _outer_addresses(service, allowed), node=place)
    return pools | _pools(service, listed, addresses, node=place, at_node_ports=True)


def _pools(
    service: Service,
    slices: tuple[EndpointSlice, ...],
    addresses: Iterable[Address],
    *,
    node: str,
    at_node_ports: bool = False,
) -> dict[Front, Pool]:
    """Every port at every address; with a node, only its own backends share the connections."""
    pools: dict[Front, Pool] = {}
    for address in addresses:
        for port in service.spec.ports:
            if number := port.node_port if at_node_ports else port.port:
                targets = _targets(port, slices, family=address.family, node=node)
                front = Front(address, protocol_number(port.protocol), number)
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


def _affinity(service: Service) -> int:
    if service.spec.session_affinity == "None":
        return 0
    config = service.spec.session_affinity_config or AffinityConfig()
    return config.client_ip.timeout_seconds


def _own_addresses(service: Service) -> list[Address]:
    texts = service.spec.cluster_ips
    return [parse_address(text, field="spec.clusterIPs") for text in texts if text and text != HEADLESS]


def _outer_addresses(service: Service, allowed: Iterable[Range]) -> list[Address]:
    given = (ingress.ip for ingress in service.status.load_balancer.ingress)
    texts = [*service.spec.external_ips, *given]
    found = [parse_address(text, field="spec.externalIPs") for text in texts if text]
    ranges = tuple(allowed)
    return [address for address in found if any(each.holds(address) for each in ranges)]
