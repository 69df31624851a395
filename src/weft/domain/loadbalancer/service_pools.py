"""The services of one tenant as pools, updated incrementally: Contiv's by their providers, Kubernetes' by their slices.

An endpoint is a provider of every Contiv service of its tenant whose selector labels it has, whichever of the two was
created first (W22, `weft.domain.services`). Label indexes in both directions make a change cost only what it affects.
Kubernetes Services also have host access.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence, Set
from typing import NamedTuple, TypeVar

import msgspec

from weft.domain import model
from weft.domain.addresses import Address
from weft.domain.errors import Invalid
from weft.domain.host_access.state import ExternalAddress, HostAccessItem, HostPort, NodePort
from weft.domain.ids import EndpointKey, NodeName
from weft.domain.loadbalancer.external_ips import ExternalIpPolicy
from weft.domain.loadbalancer.kube_objects import EndpointSlice, KubeService, KubeSlice
from weft.domain.loadbalancer.kubernetes import (
    cluster_addresses,
    external_pools,
    internal_pools,
    node_ports,
    requested_external_ips,
)
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool, Target, pool_of
from weft.domain.policy.model.protocols import protocol_number
from weft.domain.selectors import Label
from weft.domain.validation import ServicePort, check, parse_selectors, parse_service_ports

T = TypeVar("T")


class ServiceFrontends(NamedTuple):
    """The frontends of a Contiv service: each of its ports at each of its addresses."""

    addresses: tuple[Address, ...]
    ports: tuple[ServicePort, ...]


class _IndexedService(NamedTuple):
    """The frontends of a service, the labels that it selects, and the label it is indexed by."""

    frontends: ServiceFrontends
    labels: frozenset[Label]
    index_label: Label


class _Provider(NamedTuple):
    """An endpoint with its parsed addresses."""

    endpoint: model.Endpoint
    addresses: tuple[Address, ...]


class Providers:
    """The Contiv services and the endpoints of one tenant. `take_changes` returns the changed services."""

    def __init__(self) -> None:
        self._services: dict[str, _IndexedService] = {}
        self._by_index_label: defaultdict[Label, set[str]] = defaultdict(set)
        self._endpoints: dict[EndpointKey, _Provider] = {}
        self._by_label: defaultdict[Label, set[EndpointKey]] = defaultdict(set)
        self._stale: set[str] = set()

    def put_service(self, service: model.Service) -> None:
        """Add or replace a service; if it is not valid, remove it and raise `Invalid`."""
        self.remove_service(service.name)
        frontends, labels = frontends_of(service), parse_selectors(service.selectors)
        # The label with the fewest services leaves the fewest candidates for an endpoint that has it.
        index_label = min(labels, key=lambda label: (len(self._by_index_label.get(label, ())), label))
        self._services[service.name] = _IndexedService(frontends, labels, index_label)
        self._by_index_label[index_label].add(service.name)

    def remove_service(self, name: str) -> None:
        """Remove a service. Removing an absent one is not an error."""
        self._stale.add(name)
        if known := self._services.pop(name, None):
            _discard(self._by_index_label, known.index_label, name)

    def put_endpoint(self, endpoint: model.Endpoint) -> None:
        """Add or replace an endpoint."""
        key = endpoint.key
        if before := self._endpoints.get(key):
            # An unchanged endpoint must not mark its services: the agent puts endpoints repeatedly.
            if before.endpoint == endpoint:
                return
            self.remove_endpoint(key)
        self._endpoints[key] = _Provider(endpoint, endpoint.addresses)
        for label in endpoint.labels.items():
            self._by_label[label].add(key)
        # Services of the old labels are marked by `remove_endpoint` above.
        self._stale |= self._provided_by(endpoint)

    def remove_endpoint(self, key: EndpointKey) -> None:
        """Remove an endpoint and all its backends (W15). Removing an absent one is not an error."""
        known = self._endpoints.pop(key, None)
        if known is None:
            return
        for label in known.endpoint.labels.items():
            _discard(self._by_label, label, key)
        self._stale |= self._provided_by(known.endpoint)

    def take_changes(self) -> Iterator[tuple[str, dict[FrontendKey, Pool] | None]]:
        """Yield the services that changed since the last call, with their pools; None for a deleted one."""
        stale, self._stale = self._stale, set()
        for name in stale:
            known = self._services.get(name)
            yield name, None if known is None else pools_of(known.frontends, self._provider_addresses(known.labels))

    def _provided_by(self, endpoint: model.Endpoint) -> set[str]:
        labels = endpoint.labels.items()
        # A service is indexed under one of its labels, so an endpoint with all of them finds it.
        candidates = (name for label in labels for name in self._by_index_label.get(label, ()))
        return {name for name in candidates if self._services[name].labels <= labels}

    def _provider_addresses(self, labels: frozenset[Label]) -> list[Address]:
        """Return the addresses of the endpoints with all the labels."""
        none: Set[EndpointKey] = frozenset()
        # Start from the rarest label, then filter by the others.
        fewest = min((self._by_label.get(label, none) for label in labels), key=len)
        candidates = (self._endpoints[key] for key in fewest)
        providers = (candidate for candidate in candidates if labels <= candidate.endpoint.labels.items())
        return [address for provider in providers for address in provider.addresses]


def frontends_of(service: model.Service) -> ServiceFrontends:
    """Return the frontends of a service; `Invalid` if it is not valid."""
    return ServiceFrontends(service.addresses, parse_service_ports(service.ports))


def pools_of(frontends: ServiceFrontends, providers: Sequence[Address]) -> dict[FrontendKey, Pool]:
    """Return the pools of a service. A VIP has only backends of its own address family."""
    pools = {}
    for vip in frontends.addresses:
        addresses = [address for address in providers if address.family == vip.family]
        for port, target_port, protocol in frontends.ports:
            targets = (Target(address, target_port) for address in addresses)
            pools[FrontendKey(vip, protocol_number(protocol), port)] = pool_of(targets)
    return pools


def _discard(index: defaultdict[Label, set[T]], label: Label, item: T) -> None:
    index[label].discard(item)
    if not index[label]:
        del index[label]


class ServiceKey(NamedTuple):
    """A Kubernetes Service in its tenant. Its text has a slash, so it never equals the name of a Contiv service."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class ServiceContext(msgspec.Struct, frozen=True):
    """What all services of a tenant depend on beside their own objects."""

    external_ip_policy: ExternalIpPolicy = ExternalIpPolicy()
    nodeport_vips: tuple[Address, ...] = ()


class CompiledService(msgspec.Struct, frozen=True):
    """The pools and host access of a service on this node. `faults` say which of its settings are ignored, and why."""

    pools: dict[FrontendKey, Pool] = {}
    host_items: frozenset[HostAccessItem] = frozenset()
    faults: tuple[str, ...] = ()


class KubeServices:
    """The Kubernetes Services and slices of one tenant. `take_changes` returns the changed services."""

    def __init__(self, *, node: NodeName, context: ServiceContext, cluster_ips: Container[Address]) -> None:
        """`cluster_ips` are those of all services in the cluster: no service may have one as external IP."""
        self._node = node
        self._context = context
        self._cluster_ips = cluster_ips
        self._services: dict[ServiceKey, KubeService] = {}
        # Slices may arrive before their service, and stay when it is deleted and created again.
        self._slices: defaultdict[ServiceKey, dict[str, EndpointSlice]] = defaultdict(dict)
        self._stale: set[ServiceKey] = set()

    def __bool__(self) -> bool:
        """Return whether there is any service."""
        return bool(self._services)

    def set_context(self, context: ServiceContext) -> None:
        """Set the context. A change affects every service."""
        if context != self._context:
            self._context = context
            self._stale.update(self._services)

    def put_service(self, document: KubeService) -> None:
        """Add or replace a service."""
        key = ServiceKey(document.namespace, document.name)
        self._services[key] = document
        self._stale.add(key)

    def remove_service(self, key: ServiceKey) -> None:
        """Remove a service. Removing an absent one is not an error."""
        self._services.pop(key, None)
        self._stale.add(key)

    def put_slice(self, document: KubeSlice) -> None:
        """Add or replace a slice; if it is not valid, remove it and raise `Invalid`."""
        key = ServiceKey(document.namespace, document.service_name)
        # First, so that an invalid new version does not leave the old backends in place.
        self.remove_slice(key, document.name)
        # Labelled for another service proxy: its endpoints are not ours to balance.
        if not document.foreign:
            self._slices[key][document.name] = check(document).slice

    def remove_slice(self, key: ServiceKey, name: str) -> None:
        """Remove a slice. Removing an absent one is not an error."""
        self._stale.add(key)
        if key in self._slices:
            self._slices[key].pop(name, None)
            if not self._slices[key]:
                del self._slices[key]

    def take_changes(self) -> Iterator[tuple[ServiceKey, CompiledService | None]]:
        """Yield the services that changed since the last call, compiled; None for a deleted one."""
        stale, self._stale = self._stale, set()
        for key in stale:
            document = self._services.get(key)
            yield key, None if document is None else self._compile(document, self._slices.get(key, {}))

    def _compile(self, document: KubeService, by_name: dict[str, EndpointSlice]) -> CompiledService:
        # Sorted, so that the result does not depend on the order of arrival.
        service, slices = document.service, [by_name[name] for name in sorted(by_name)]
        try:
            requested = requested_external_ips(check(document).service)
            policy = self._context.external_ip_policy
            ip_faults = {address: policy.fault(address, self._cluster_ips) for address in requested}
            external_ips = [address for address, fault in ip_faults.items() if not fault]
            vips = self._context.nodeport_vips
            pools = internal_pools(service, slices, node=self._node, external_ips=external_ips) | external_pools(
                service, slices, node=self._node, external_ips=external_ips, nodeport_vips=vips
            )
            host_items = frozenset(_host_items(document, external_ips, vips))
        except Invalid as error:
            # Fail closed: a service that cannot be parsed has no frontend at all.
            return CompiledService(faults=(error.message,))
        faults = (f"external address {address} {fault}" for address, fault in ip_faults.items() if fault)
        return CompiledService(pools, host_items, tuple(faults))


def _host_items(
    document: KubeService, external_ips: Iterable[Address], nodeport_vips: Iterable[Address]
) -> Iterator[HostAccessItem]:
    tenant, service = document.tenant, document.service
    cluster_ips = cluster_addresses(service)
    for address in cluster_ips:
        # A shared service is reachable from all tenants of the node, through the host.
        yield ExternalAddress(tenant, address, "tenants" if document.shared else "host")
    for address in external_ips:
        yield ExternalAddress(tenant, address, "world")
        yield from _host_ports(document, address, cluster_ips=cluster_ips, nodeport_vips=nodeport_vips)
    for protocol, port in node_ports(service):
        yield NodePort(tenant, protocol, port)


def _host_ports(
    document: KubeService, address: Address, *, cluster_ips: Iterable[Address], nodeport_vips: Iterable[Address]
) -> Iterator[HostPort]:
    """Yield DNAT for an external IP that the host itself owns: routing would deliver it locally."""
    family = address.family
    for port in document.service.spec.ports:
        # The NodePort VIP is preferred, because its pool obeys externalTrafficPolicy.
        destinations = [(vip, port.node_port) for vip in nodeport_vips if port.node_port] or [
            (cluster_ip, port.port) for cluster_ip in cluster_ips
        ]
        for target, target_port in destinations:
            if target.family == family:
                protocol = protocol_number(port.protocol)
                yield HostPort(document.tenant, family, protocol, port.port, target, target_port, address)
                break


def valid_cluster_ips(document: KubeService) -> tuple[Address, ...]:
    """Return the cluster IPs of a service; none if the service is not valid."""
    try:
        return tuple(cluster_addresses(document.service))
    except Invalid:
        return ()  # reported as a fault of the service


def service_faults(document: KubeService, policy: ExternalIpPolicy, cluster_ips: Container[Address]) -> tuple[str, ...]:
    """Return which settings of a service are ignored on every node, and why."""
    services = KubeServices(node=NodeName(""), context=ServiceContext(policy), cluster_ips=cluster_ips)
    services.put_service(document)
    return tuple(fault for _, compiled in services.take_changes() if compiled for fault in compiled.faults)
