"""Kubernetes' services of one tenant with their slices, kept as documents come and go, and what follows from each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

import msgspec

from weft.domain.addresses import Address
from weft.domain.errors import Invalid
from weft.domain.host_access.state import ExternalAddress, HostPart, HostPort, NodePort
from weft.domain.ids import NodeName
from weft.domain.loadbalancer.external_ips import OuterRules
from weft.domain.loadbalancer.kube_objects import EndpointSlice, KubeService, KubeSlice
from weft.domain.loadbalancer.kubernetes import (
    node_ports,
    own_addresses,
    pools_for_outside,
    pools_for_pods,
    sources_at,
    wanted_addresses,
)
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool
from weft.domain.policy.model.protocols import protocol_number
from weft.domain.validation import check


class ServiceKey(NamedTuple):
    """A service of Kubernetes in its tenant. As text it is never the name of another kind of service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Surroundings(msgspec.Struct, frozen=True):
    """What a tenant's services depend on beside themselves."""

    rules: OuterRules = OuterRules()
    doors: tuple[Address, ...] = ()


class KubeView(msgspec.Struct, frozen=True):
    """What a service comes to on this node; with faults, what of it has no effect, and why."""

    pools: dict[FrontendKey, Pool] = {}
    openings: frozenset[HostPart] = frozenset()
    faults: tuple[str, ...] = ()


class KubeServices:
    """The services and slices of one tenant. `take` tells which services have changed."""

    def __init__(self, *, node: NodeName, surroundings: Surroundings, own: Container[Address]) -> None:
        """`own` are the addresses of all services inside the cluster, which no service has as an outer one."""
        self._node = node
        self._surroundings = surroundings
        self._own = own
        self._services: dict[ServiceKey, KubeService] = {}
        self._slices: defaultdict[ServiceKey, dict[str, EndpointSlice]] = defaultdict(dict)
        self._touched: set[ServiceKey] = set()

    def __bool__(self) -> bool:
        """Whether there is a service at all."""
        return bool(self._services)

    def surround(self, surroundings: Surroundings) -> None:
        """What services depend on is another now."""
        if surroundings != self._surroundings:
            self._surroundings = surroundings
            self._touched.update(self._services)

    def put_service(self, document: KubeService) -> None:
        """A service as it is now."""
        key = ServiceKey(document.namespace, document.name)
        self._services[key] = document
        self._touched.add(key)

    def remove_service(self, key: ServiceKey) -> None:
        """A service is no more; never having been is fine."""
        self._services.pop(key, None)
        self._touched.add(key)

    def put_slice(self, document: KubeSlice) -> None:
        """A slice as it is now; `Invalid` when it is not as a writer may let it be, and then there is none."""
        key = ServiceKey(document.namespace, document.service_name)
        self.remove_slice(key, document.name)
        if not document.foreign:
            self._slices[key][document.name] = check(document).slice

    def remove_slice(self, key: ServiceKey, name: str) -> None:
        """A slice is no more; never having been is fine."""
        self._touched.add(key)
        if key in self._slices:
            self._slices[key].pop(name, None)
            if not self._slices[key]:
                del self._slices[key]

    def take(self) -> Iterator[tuple[ServiceKey, KubeView | None]]:
        """The services that have changed since the last time, with what they come to; None for one that is no more."""
        touched, self._touched = self._touched, set()
        for key in touched:
            document = self._services.get(key)
            yield key, None if document is None else self._view(document, self._slices.get(key, {}))

    def _view(self, document: KubeService, by_name: dict[str, EndpointSlice]) -> KubeView:
        service, slices = document.service, [by_name[name] for name in sorted(by_name)]
        try:
            wanted = wanted_addresses(check(document).service)
            judged = {address: self._surroundings.rules.fault(address, self._own) for address in wanted}
            outer = [address for address, fault in judged.items() if not fault]
            pools = pools_for_pods(service, slices, node=self._node, outer=outer) | pools_for_outside(
                service, slices, node=self._node, outer=outer, doors=self._surroundings.doors
            )
            openings = frozenset(_openings(document, outer, self._surroundings.doors))
        except Invalid as error:
            return KubeView(faults=(error.message,))
        faults = (f"external address {address} {fault}" for address, fault in judged.items() if fault)
        return KubeView(pools, openings, tuple(faults))


def _openings(document: KubeService, outer: Iterable[Address], doors: Iterable[Address]) -> Iterator[HostPart]:
    tenant, service = document.tenant, document.service
    own = own_addresses(service)
    for address in own:
        yield ExternalAddress(tenant, address, "tenants" if document.shared else "host")
    for address in outer:
        yield ExternalAddress(tenant, address, "world", sources_at(service, address))
        yield from _local_ports(document, address, own=own, doors=doors)
    for protocol, port in node_ports(service):
        yield NodePort(tenant, protocol, port)


def _local_ports(
    document: KubeService, address: Address, *, own: Iterable[Address], doors: Iterable[Address]
) -> Iterator[HostPort]:
    """Where an outer address leads on a host that has it itself: there it is no address of others to be led to."""
    family = address.family
    for port in document.service.spec.ports:
        inside = [(each, port.node_port) for each in doors if port.node_port] or [(each, port.port) for each in own]
        for target, number in inside:
            if target.family == family:
                protocol = protocol_number(port.protocol)
                yield HostPort(document.tenant, family, protocol, port.port, target, number, address)
                break


def known_addresses(document: KubeService) -> tuple[Address, ...]:
    """The addresses that the cluster has given to a service; none where it has no effect."""
    try:
        return tuple(own_addresses(document.service))
    except Invalid:
        return ()  # told as a fault of the service


def faults_of(document: KubeService, rules: OuterRules, own: Container[Address]) -> tuple[str, ...]:
    """What of a service has no effect, and why, on whatever node."""
    services = KubeServices(node=NodeName(""), surroundings=Surroundings(rules), own=own)
    services.put_service(document)
    return tuple(fault for _, view in services.take() if view for fault in view.faults)
