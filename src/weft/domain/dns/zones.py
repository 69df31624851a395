"""The DNS zone of a tenant: records of its own objects, and of the Kubernetes Services and pods in it.

A Kubernetes Service resolves in its own tenant; a shared one and the cluster DNS service resolve in every tenant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from weft.domain import kinds, model
from weft.domain.addresses import Address, parse_address
from weft.domain.cluster import Cluster
from weft.domain.dns.cluster_names import (
    Backend,
    ServicePort,
    cluster_service_entry,
    external_service_entry,
    headless_service_entry,
    pod_entry,
)
from weft.domain.dns.names import (
    CLUSTER_DOMAIN,
    EMPTY_ENTRY,
    DnsEgressDenied,
    Entry,
    Zone,
    endpoint_entry,
    endpoint_owner,
    never_denied,
    service_entry,
    service_owner,
)
from weft.domain.errors import Invalid
from weft.domain.ids import TenantName
from weft.domain.ipam import ipam
from weft.domain.loadbalancer.kube_objects import HEADLESS, EndpointSlice, KubeService


def tenant_zone(
    cluster: Cluster,
    tenant: TenantName,
    *,
    dns_egress_denied: DnsEgressDenied = never_denied,
    domain: str = CLUSTER_DOMAIN,
) -> Zone:
    """Return all records of a tenant."""
    entries: dict[str, Entry] = {}
    for service in cluster.all(kinds.SERVICE, tenant):
        entries[service_owner(service.name)] = service_entry(service, domain=domain)
    for network in cluster.networks(tenant):
        for endpoint in cluster.covered_endpoints(network.key):
            owner = endpoint_owner(endpoint.network, endpoint.endpoint_id)
            entries[owner] = workload_entry(endpoint, dns_egress_denied=dns_egress_denied, domain=domain)
    # One pass over all slices, rather than one scan per service.
    slices = _slices_by_service(cluster)
    for document in cluster.all(kinds.KUBE_SERVICE):
        if document.tenant == tenant or is_in_every_tenant(document):
            found = slices[document.tenant, document.namespace, document.name]
            entries[kube_owner(document.namespace, document.name)] = kube_entry(document, found, domain=domain)
    return Zone(
        {owner: entry for owner, entry in entries.items() if entry != EMPTY_ENTRY}, tenant_subnets(cluster, tenant)
    )


def tenant_subnets(cluster: Cluster, tenant: TenantName) -> tuple[str, ...]:
    """Return the subnets of the tenant's networks, of both families."""
    return tuple(subnet for network in cluster.networks(tenant) for subnet in _network_subnets(network))


def _network_subnets(network: model.Network) -> Iterator[str]:
    for family in (4, 6):
        try:
            subnet = ipam.subnet_of(network, family)
        except Invalid:
            continue  # no endpoint can have an address in it
        if subnet:
            yield f"{Address(family, subnet.base)}/{subnet.length}"


def workload_entry(
    endpoint: model.Endpoint, *, dns_egress_denied: DnsEgressDenied = never_denied, domain: str = CLUSTER_DOMAIN
) -> Entry:
    """Return the records of an endpoint; a pod also has records by address."""
    entry = endpoint_entry(endpoint, dns_egress_denied=dns_egress_denied, domain=domain)
    if endpoint.pod is None or entry.fault:
        return entry
    # Both schemes apply to a pod: Contiv's bare name, and Kubernetes' name by address.
    pod = pod_entry(endpoint.pod.namespace, addresses=endpoint.addresses, domain=domain)
    return Entry((*entry.records, *pod.records), entry.dns_egress_denied, entry.tcp_dns_egress_denied)


def kube_owner(namespace: str, name: str) -> str:
    return f"kube:{namespace}:{name}"


def stored_kube_entry(
    cluster: Cluster, tenant: TenantName, namespace: str, name: str, *, domain: str = CLUSTER_DOMAIN
) -> tuple[Entry, bool]:
    """Return the records of a stored Service, empty if it is gone; and whether they belong to every tenant."""
    stored = cluster.get(kinds.KUBE_SERVICE, tenant, namespace, name)
    if stored is None:
        return EMPTY_ENTRY, False
    slices = (each.slice for each in cluster.all(kinds.KUBE_SLICE, tenant, namespace, name))
    return kube_entry(stored.value, slices, domain=domain), is_in_every_tenant(stored.value)


def is_in_every_tenant(document: KubeService) -> bool:
    """Return whether a Kubernetes Service resolves in every tenant."""
    return document.shared or document.cluster_dns


def kube_entry(document: KubeService, slices: Iterable[EndpointSlice], *, domain: str = CLUSTER_DOMAIN) -> Entry:
    """Return the records of a Kubernetes Service. Invalid addresses are skipped."""
    spec = document.service.spec
    naming = {"namespace": document.namespace, "service": document.name, "domain": domain}
    if spec.type == "ExternalName":
        return external_service_entry(target=spec.external_name, **naming) if spec.external_name else EMPTY_ENTRY
    if HEADLESS in spec.cluster_ips:
        # Slices of type FQDN have no addresses.
        ip_slices = [known for known in slices if known.address_type in {"IPv4", "IPv6"}]
        backends = dict.fromkeys(_backends(ip_slices))  # unique, in order
        return headless_service_entry(backends=backends, ports=_slice_ports(ip_slices), **naming)
    ports = [ServicePort(port.name, port.protocol, port.port) for port in spec.ports]
    addresses = tuple(_valid_addresses(spec.cluster_ips))
    return cluster_service_entry(addresses=addresses, ports=ports, **naming) if addresses else EMPTY_ENTRY


def _backends(slices: Iterable[EndpointSlice]) -> Iterator[Backend]:
    for each in slices:
        for endpoint in each.endpoints or ():
            # The API defines absent `ready` as true.
            if endpoint.conditions.ready is not False:
                yield from (Backend(address, endpoint.hostname) for address in _valid_addresses(endpoint.addresses))


def _slice_ports(slices: Iterable[EndpointSlice]) -> Iterable[ServicePort]:
    found = (port for each in slices for port in each.ports or () if port.port)
    return dict.fromkeys(ServicePort(port.name, port.protocol, port.port or 0) for port in found)


def _valid_addresses(texts: Iterable[str]) -> Iterator[Address]:
    for text in texts:
        try:
            yield parse_address(text, field="addresses")
        except Invalid:
            continue  # the load balancer reports it as a fault of the service


def _slices_by_service(cluster: Cluster) -> defaultdict[tuple[str, str, str], list[EndpointSlice]]:
    slices: defaultdict[tuple[str, str, str], list[EndpointSlice]] = defaultdict(list)
    for each in cluster.all(kinds.KUBE_SLICE):
        slices[each.tenant, each.namespace, each.service_name].append(each.slice)
    return slices
