"""(cluster, tenant) -> all its names: those of its own objects, and of Kubernetes' services and pods in it.

Kubernetes' services resolve in the tenant they are in, those that are shared in every tenant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from weft.domain import kinds, model
from weft.domain.addresses import Address, parse_address
from weft.domain.cluster import Cluster
from weft.domain.dns.cluster_names import (
    CLUSTER_DOMAIN,
    Backend,
    ServicePort,
    cluster_service_entry,
    external_service_entry,
    headless_service_entry,
    pod_entry,
)
from weft.domain.dns.names import (
    NOTHING,
    Entry,
    KeepsIn,
    Zone,
    endpoint_entry,
    endpoint_owner,
    nobody,
    service_entry,
    service_owner,
)
from weft.domain.errors import Invalid
from weft.domain.ids import TenantName
from weft.domain.ipam import ipam
from weft.domain.loadbalancer.kube_objects import HEADLESS, EndpointSlice, KubeService


def tenant_zone(
    cluster: Cluster, tenant: TenantName, *, dns_egress_denied: KeepsIn = nobody, domain: str = CLUSTER_DOMAIN
) -> Zone:
    """The tenant's names."""
    entries: dict[str, Entry] = {}
    for service in cluster.all(kinds.SERVICE, tenant):
        entries[service_owner(service.name)] = service_entry(service)
    for network in cluster.networks(tenant):
        for endpoint in cluster.endpoints(network.key):
            owner = endpoint_owner(endpoint.network, endpoint.endpoint_id)
            entries[owner] = workload_entry(endpoint, dns_egress_denied=dns_egress_denied, domain=domain)
    slices = _slices_by_service(cluster)
    for document in cluster.all(kinds.KUBE_SERVICE):
        if document.tenant == tenant or is_everywhere(document):
            found = slices[document.tenant, document.namespace, document.name]
            entries[kube_owner(document.namespace, document.name)] = kube_entry(document, found, domain=domain)
    return Zone({owner: entry for owner, entry in entries.items() if entry != NOTHING}, tenant_subnets(cluster, tenant))


def tenant_subnets(cluster: Cluster, tenant: TenantName) -> tuple[str, ...]:
    """The subnets of the tenant's networks, of both families."""
    return tuple(
        f"{Address(family, subnet.base)}/{subnet.length}"
        for network in cluster.networks(tenant)
        for family in (4, 6)
        if (subnet := ipam.subnet_of(network, family))
    )


def workload_entry(
    endpoint: model.Endpoint, *, dns_egress_denied: KeepsIn = nobody, domain: str = CLUSTER_DOMAIN
) -> Entry:
    """An endpoint's names; a pod is also known by its addresses."""
    entry = endpoint_entry(endpoint, dns_egress_denied=dns_egress_denied)
    if endpoint.pod is None:
        return entry
    pod = pod_entry(endpoint.pod.namespace, addresses=endpoint.addresses, domain=domain)
    return Entry((*entry.records, *pod.records), entry.dns_egress_denied)


def kube_owner(namespace: str, name: str) -> str:
    return f"kube:{namespace}:{name}"


def stored_kube_entry(
    cluster: Cluster, tenant: TenantName, namespace: str, name: str, *, domain: str = CLUSTER_DOMAIN
) -> tuple[Entry, bool]:
    """What a service of Kubernetes brings now, nothing when there is none; and whether it brings it to all tenants."""
    stored = cluster.get(kinds.KUBE_SERVICE, tenant, namespace, name)
    if stored is None:
        return NOTHING, False
    slices = (each.slice for each in cluster.all(kinds.KUBE_SLICE, tenant, namespace, name))
    return kube_entry(stored.value, slices, domain=domain), is_everywhere(stored.value)


def is_everywhere(document: KubeService) -> bool:
    """Whether a service of Kubernetes resolves in all tenants."""
    return document.shared or document.names


def kube_entry(document: KubeService, slices: Iterable[EndpointSlice], *, domain: str = CLUSTER_DOMAIN) -> Entry:
    """What a service of Kubernetes brings. An address that cannot be read brings nothing."""
    spec = document.service.spec
    where = {"namespace": document.namespace, "service": document.name, "domain": domain}
    if spec.type == "ExternalName":
        return external_service_entry(target=spec.external_name, **where) if spec.external_name else NOTHING
    if HEADLESS in spec.cluster_ips:
        ready = [each for each in slices if each.address_type in {"IPv4", "IPv6"}]
        return headless_service_entry(backends=dict.fromkeys(_backends(ready)), ports=_slice_ports(ready), **where)
    ports = [ServicePort(port.name, port.protocol, port.port) for port in spec.ports]
    addresses = tuple(_readable(spec.cluster_ips))
    return cluster_service_entry(addresses=addresses, ports=ports, **where) if addresses else NOTHING


def _backends(slices: Iterable[EndpointSlice]) -> Iterator[Backend]:
    for each in slices:
        for endpoint in each.endpoints or ():
            if endpoint.conditions.ready is not False:
                yield from (Backend(address, endpoint.hostname) for address in _readable(endpoint.addresses))


def _slice_ports(slices: Iterable[EndpointSlice]) -> Iterable[ServicePort]:
    found = (port for each in slices for port in each.ports or () if port.port)
    return dict.fromkeys(ServicePort(port.name, port.protocol, port.port or 0) for port in found)


def _readable(texts: Iterable[str]) -> Iterator[Address]:
    for text in texts:
        try:
            yield parse_address(text, field="addresses")
        except Invalid:
            continue  # told where connections are balanced


def _slices_by_service(cluster: Cluster) -> defaultdict[tuple[str, str, str], list[EndpointSlice]]:
    slices: defaultdict[tuple[str, str, str], list[EndpointSlice]] = defaultdict(list)
    for each in cluster.all(kinds.KUBE_SLICE):
        slices[each.tenant, each.namespace, each.service_name].append(each.slice)
    return slices
