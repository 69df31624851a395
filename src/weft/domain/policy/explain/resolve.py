"""Resolves the ends of a flow that a person names for a trace: endpoints, hosts and addresses.

An answer about the wrong peer is worse than none. So nothing is guessed: a name or address that several endpoints have,
an address of a network that no endpoint has, and an address that a service translates are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from weft.domain import kinds, model
from weft.domain.addresses import Address, parse_address, parse_prefix_or_range, parse_subnet_v4
from weft.domain.cluster import Cluster
from weft.domain.errors import Invalid, NotFound
from weft.domain.ipam import ipam
from weft.domain.loadbalancer.kube_objects import KubeService
from weft.domain.loadbalancer.kubernetes import cluster_addresses, node_ports, requested_external_ips
from weft.domain.policy.engine.decide import Flow
from weft.domain.policy.engine.engine import Directory
from weft.domain.policy.model.identities import Identity, IdentityKey, Kind, identity_of_world
from weft.domain.policy.model.protocols import parse_service, protocol_number, service_name
from weft.domain.services import providers
from weft.domain.validation import parse_service_ports

# How many candidates or backends an error lists.
_LISTED = 5

# Packets to or from these addresses (RFC 6890) do not leave the sender's link, or are not to one peer.
_NOT_A_PEER = tuple(
    (parse_prefix_or_range(prefix, field="address"), reason)
    for prefix, reason in {
        "0.0.0.0/8": "is not an address of a peer",
        "127.0.0.0/8": "is loopback: the packet does not leave its pod",
        "169.254.0.0/16": "is link-local",
        "224.0.0.0/3": "is multicast or reserved",
        "::/127": "is loopback or unspecified: the packet does not leave its pod",
        "fe80::/10": "is link-local",
        "ff00::/8": "is multicast",
    }.items()
)


class TraceQuery(NamedTuple):
    """A flow as a person writes it. `tenant` is that of its addresses; empty if the other end or nothing says it."""

    source: str
    target: str
    service: str
    tenant: str = ""
    version: int | None = None


class FlowResolver:
    """Resolves the flows of one cluster state. The directory is that of an engine in sync with the cluster."""

    def __init__(self, cluster: Cluster, directory: Directory) -> None:
        self._cluster = cluster
        self._directory = directory

    def flow(self, query: TraceQuery) -> Flow:
        """The flow; `Invalid` or `NotFound` if one of its ends is not exactly one peer."""
        protocol, port = parse_service(query.service)
        if query.tenant and self._cluster.get(kinds.TENANT, query.tenant) is None:
            raise NotFound(f"tenant {query.tenant[:80]!r} does not exist", field="tenant")
        texts = {"src": query.source, "dst": query.target}
        named = {field: self._named(text, tenant=query.tenant, field=field) for field, text in texts.items()}
        # An address means that of the tenant in which the other end is.
        scope = {end.tenant for end in named.values() if end is not None and end.tenant}
        ends = {
            field: named[field] or self._at(_address(text, field=field), scope=scope, query=query, field=field)
            for field, text in texts.items()
        }
        if all(end.kind is not Kind.WORKLOAD for end in ends.values()):
            raise Invalid(f"neither {query.source} nor {query.target} is an endpoint: no policy applies", field="src")
        self._refuse_node_port(ends["dst"], protocol, port)
        return self._directory.flow_between(
            ends["src"], ends["dst"], protocol=protocol, port=port, version=query.version
        )

    def target(self, text: str, *, tenant: str, service: str) -> Identity:
        """A destination of a tenant's endpoint, by name or address."""
        protocol, port = parse_service(service)
        query = TraceQuery(source="", target=text, service=service)
        found = self._named(text, tenant=tenant, field="dst") or self._at(
            _address(text, field="dst"), scope={tenant}, query=query, field="dst"
        )
        self._refuse_node_port(found, protocol, port)
        return found

    def _named(self, text: str, *, tenant: str, field: str) -> Identity | None:
        """The only peer of this name; None if the text is an address."""
        if _is_address(text):
            return None
        if (exact := self._directory.get(IdentityKey(text))) is not None:
            return exact
        found = [each for each in self._cluster.find_endpoints(text) if tenant in {"", each.tenant}]
        # An exact match wins, so that an endpoint whose id is a part of another's stays addressable.
        chosen = [each for each in found if text in _names(each)] or found
        if len(chosen) > 1:
            keys = ", ".join(str(each.key) for each in chosen[:_LISTED])
            more = f" and {len(chosen) - _LISTED} more" if len(chosen) > _LISTED else ""
            raise Invalid(
                f"{text[:200]!r} may mean {len(chosen)} endpoints: {keys}{more}: write the key of one", field=field
            )
        if not chosen:
            self._refuse_service_name(text, tenant=tenant, field=field)
            raise NotFound(f"{text[:200]!r} is neither an endpoint nor a host nor an address", field=field)
        identity = self._directory.get(IdentityKey(str(chosen[0].key)))
        if identity is None:
            raise NotFound(f"the policy engine does not know endpoint {chosen[0].key} yet", field=field)
        return identity

    def _at(self, address: Address, *, scope: set[str], query: TraceQuery, field: str) -> Identity:
        """The only peer with this address."""
        for special, reason in _NOT_A_PEER:
            if special.holds(address):
                raise Invalid(f"{address} {reason}", field=field)
        scope = {query.tenant} if query.tenant else scope
        holders = self._directory.holders(address)
        workloads = [holder for holder in holders if holder.kind is Kind.WORKLOAD]
        own = [holder for holder in workloads if not scope or holder.tenant in scope]
        if len(own) > 1:
            tenants = ", ".join(sorted({holder.tenant for holder in own}))
            keys = ", ".join(holder.key for holder in own[:_LISTED])
            raise Invalid(
                f"{address} is in tenants {tenants} ({keys}): add -t TENANT, or name the endpoint", field=field
            )
        if own:
            return own[0]
        self._refuse_service_address(address, scope=scope, query=query, field=field)
        self._refuse_other_tenant(address, workloads, query=query, field=field)
        # Of another tenant than the named end: tenants are isolated, which the verdict says.
        if len(workloads) == 1:
            return workloads[0]
        for holder in holders:
            if holder.kind is not Kind.WORKLOAD:
                # A host has several addresses: the flow uses the requested one.
                return msgspec.structs.replace(holder, addresses=(address,))
        self._refuse_unused(address, field=field)
        return identity_of_world(address)

    def _refuse_other_tenant(
        self, address: Address, workloads: list[Identity], *, query: TraceQuery, field: str
    ) -> None:
        if workloads and (query.tenant or len(workloads) > 1):
            keys = ", ".join(holder.key for holder in workloads[:_LISTED])
            where = f"in tenant {query.tenant}" if query.tenant else "in the tenant of the other end"
            raise NotFound(f"no endpoint {where} has {address}; {keys} has it", field=field)

    def _refuse_unused(self, address: Address, *, field: str) -> None:
        """Refuse an address inside the cluster that no endpoint has: it is not outside."""
        for network in self._cluster.all(kinds.NETWORK):
            subnet = ipam.subnet_of(network, address.family)
            if subnet is None or not subnet.whole.holds(address):
                continue
            if ipam.gateway_of(network, address.family) == address:
                raise Invalid(f"{address} is the gateway of network {network.key}, not an endpoint", field=field)
            raise NotFound(f"{address} is in network {network.key}, but no endpoint has it", field=field)
        private = self._cluster.global_settings().pvt_subnet
        if address.family == 4 and parse_subnet_v4(private, field="pvtSubnet").whole.holds(address):
            raise Invalid(f"{address} is in pvtSubnet {private}: name the endpoint that it stands for", field=field)

    def _refuse_service_name(self, text: str, *, tenant: str, field: str) -> None:
        for service in self._cluster.all(kinds.SERVICE):
            if tenant in {"", service.tenant} and text in {service.name, kinds.SERVICE.key_text(service)}:
                raise Invalid(f"{text!r} is {self._describe(service)}", field=field)
        for document in self._cluster.all(kinds.KUBE_SERVICE):
            if text == f"{document.namespace}/{document.name}" and tenant in {"", document.tenant}:
                raise Invalid(f"{text!r} is {self._describe_kube(document)}", field=field)

    def _refuse_service_address(self, address: Address, *, scope: set[str], query: TraceQuery, field: str) -> None:
        """Refuse the address of a service: the packet goes to a backend, and each may have another verdict."""
        for service in self._cluster.all(kinds.SERVICE):
            if address in service.addresses and (not scope or service.tenant in scope):
                raise Invalid(f"{address} is {self._describe(service, query.service)}", field=field)
        for document in self._cluster.all(kinds.KUBE_SERVICE):
            # Shared services are reachable from other tenants too.
            is_visible = document.shared or document.cluster_dns or not scope or document.tenant in scope
            if is_visible and address in _kube_addresses(document):
                raise Invalid(f"{address} is {self._describe_kube(document)}", field=field)

    def _refuse_node_port(self, target: Identity, protocol: int, port: int) -> None:
        if target.kind is not Kind.HOST:
            return
        for document in self._cluster.all(kinds.KUBE_SERVICE):
            if (protocol, port) in _kube_node_ports(document):
                raise Invalid(
                    f"{service_name(protocol, port)} of {target.key} is a node port of {self._describe_kube(document)}",
                    field="service",
                )

    def _describe(self, service: model.Service, wanted: str = "") -> str:
        key = kinds.SERVICE.key_text(service)
        ports = {service_name(protocol_number(name), port): (name, to) for port, to, name in _service_ports(service)}
        if wanted and wanted.lower() not in ports:
            return f"the VIP of service {key}, which has no port {wanted[:20]}, only {', '.join(ports)}"
        backends = [str(each.key) for each in providers(self._cluster, service)]
        if not backends:
            return f"the VIP of service {key}, which has no backend"
        suffix = ""
        if wanted:
            name, to = ports[wanted.lower()]
            suffix = f" with {name.lower()}/{to}"
        return f"the VIP of service {key}: trace one of its backends{suffix}: {_listed(backends)}"

    def _describe_kube(self, document: KubeService) -> str:
        key = f"{document.namespace}/{document.name}"
        slices = self._cluster.all(kinds.KUBE_SLICE, document.tenant, document.namespace, document.name)
        backends = [address for each in slices for end in each.slice.endpoints or () for address in end.addresses[:1]]
        if not backends:
            return f"service {key} of tenant {document.tenant}, which has no backend"
        return f"service {key} of tenant {document.tenant}: trace one of its backends: {_listed(backends)}"


def _names(endpoint: model.Endpoint) -> set[str]:
    name = endpoint.container_name
    return {str(endpoint.key), endpoint.endpoint_id, endpoint.container_id, name, name.partition("/")[2]}


def _is_address(text: str) -> bool:
    try:
        parse_address(text, field="address")
    except Invalid:
        return False
    return True


def _address(text: str, *, field: str) -> Address:
    return parse_address(text, field=field)


def _listed(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:_LISTED])
    return f"{shown} and {len(names) - _LISTED} more" if len(names) > _LISTED else shown


def _service_ports(service: model.Service) -> Iterator[tuple[int, int, str]]:
    try:
        yield from parse_service_ports(service.ports)
    except Invalid:
        return


def _kube_addresses(document: KubeService) -> list[Address]:
    try:
        return [*cluster_addresses(document.service), *requested_external_ips(document.service)]
    except Invalid:
        return []  # reported as a fault of the service


def _kube_node_ports(document: KubeService) -> list[tuple[int, int]]:
    try:
        return list(node_ports(document.service))
    except Invalid:
        return []
