"""Services as a datapath feature: backends and load balancer tables of every tenant with endpoints on this node.

Endpoints come from the store, with their current labels. Local ones are backends only while they are attached: from
before their port is opened until it is removed, whatever the store says in the meantime.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Set

from weft.agent.store.attachment_store import HAS_PORT, AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff, joined
from weft.domain.desired.state import NOTHING, StateItem, rank
from weft.domain.errors import Invalid
from weft.domain.host_access.nodeport_vips import nodeport_vips
from weft.domain.host_access.refcounts import HostAccessRefcounts
from weft.domain.host_access.state import ExternalAddress, HostAccessItem, NodePortVip, is_host_scoped
from weft.domain.ids import EndpointKey, NodeName, StoreKey, TenantName
from weft.domain.ipam import ipam
from weft.domain.loadbalancer.cluster_dns import cluster_dns_pools
from weft.domain.loadbalancer.external_ips import external_ip_policy
from weft.domain.loadbalancer.kube_objects import KubeService
from weft.domain.loadbalancer.kubernetes import is_externally_reachable
from weft.domain.loadbalancer.service_pools import (
    KubeServices,
    Providers,
    ServiceContext,
    ServiceKey,
    valid_cluster_ips,
)
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import LoadBalancerTable, Pool
from weft.domain.store_keys import ObjectKey, parse_store_key
from weft.runtime.logs import Log

log = Log("services")

_KUBE_PREFIXES = (kinds.KUBE_SERVICE.prefix, kinds.KUBE_SLICE.prefix)
_PREFIXES = (kinds.SERVICE.prefix, kinds.ENDPOINT.prefix, *_KUBE_PREFIXES)
# What the services of a tenant depend on beside their own objects.
_CONTEXT_PREFIXES = (kinds.TENANT.prefix, kinds.NETWORK.prefix, kinds.NODE.prefix, kinds.GLOBAL.prefix)


class KubeIndex:
    """An index of all tenants' Kubernetes services: cluster IPs, and tenants whose services every node must serve."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.replace()

    def replace(self) -> None:
        """Build the index from the cluster."""
        # What each service contributes, to be subtracted when it changes.
        self._known: dict[StoreKey, tuple[TenantName, tuple[Address, ...], bool]] = {}
        # Services per tenant that are reachable from outside the tenant.
        self._exposed: Counter[TenantName] = Counter()
        self.cluster_ips: Counter[Address] = Counter()
        self._cluster_dns: set[StoreKey] = set()
        # Services with a `healthCheckNodePort`.
        self.health_checked: dict[StoreKey, KubeService] = {}
        for document in self._cluster.all(kinds.KUBE_SERVICE):
            self.follow(kinds.KUBE_SERVICE.store_key(*kinds.KUBE_SERVICE.key_parts(document)))

    def follow(self, key: StoreKey) -> bool:
        """Read a service again; whether it is, or was until now, a cluster DNS service."""
        was_cluster_dns = key in self._cluster_dns
        self._cluster_dns.discard(key)
        self.health_checked.pop(key, None)
        if before := self._known.pop(key, None):
            self._count(*before, by=-1)
        parsed = parse_store_key(key)
        stored = self._cluster.get(kinds.KUBE_SERVICE, *parsed.parts) if isinstance(parsed, ObjectKey) else None
        if stored is not None:
            document = stored.value
            exposed = document.shared or document.cluster_dns or is_externally_reachable(document.service)
            exposed &= not document.foreign
            known = document.tenant, valid_cluster_ips(document), exposed
            self._known[key] = known
            self._count(*known, by=1)
            if document.cluster_dns:
                self._cluster_dns.add(key)
            if document.service.spec.health_check_node_port and not document.foreign:
                self.health_checked[key] = document
        return was_cluster_dns or key in self._cluster_dns

    def is_health_checked(self, key: StoreKey) -> bool:
        """Whether a service, or the service of a slice, has a `healthCheckNodePort`."""
        parsed = parse_store_key(key)
        if not isinstance(parsed, ObjectKey) or parsed.kind.prefix not in _KUBE_PREFIXES:
            return False
        # The first three parts of a slice's key are those of its service.
        return kinds.KUBE_SERVICE.store_key(*parsed.parts[:3]) in self.health_checked

    def _count(self, tenant: TenantName, cluster_ips: Iterable[Address], exposed: bool, *, by: int) -> None:
        self._exposed[tenant] += by * exposed
        for address in cluster_ips:
            self.cluster_ips[address] += by
            if not self.cluster_ips[address]:
                del self.cluster_ips[address]

    @property
    def exposed_tenants(self) -> frozenset[TenantName]:
        """Tenants with services that are reachable from outside the tenant, at every node."""
        exposed = (tenant for tenant, count in self._exposed.items() if count)
        return frozenset(tenant for tenant in exposed if self._cluster.get(kinds.TENANT, tenant))


class TenantKubeServices:
    """The Kubernetes services of one tenant: pools for its load balancer table, and state items for the host."""

    def __init__(
        self, cluster: Cluster, tenant: TenantName, *, node: NodeName, cluster_ips: Container[Address]
    ) -> None:
        self._cluster = cluster
        self._tenant = tenant
        self._context = ServiceContext()
        self._services = KubeServices(node=node, context=self._context, cluster_ips=cluster_ips)
        self._context_changed = True
        # Services share host items, such as the node port VIP: an item goes with the last service that needs it.
        self._host_items = HostAccessRefcounts()
        self._faults: dict[ServiceKey, tuple[str, ...]] = {}
        for service in cluster.all(kinds.KUBE_SERVICE, tenant):
            self.follow(kinds.KUBE_SERVICE.store_key(*kinds.KUBE_SERVICE.key_parts(service)))
        for endpoint_slice in cluster.all(kinds.KUBE_SLICE, tenant):
            self.follow(kinds.KUBE_SLICE.store_key(*kinds.KUBE_SLICE.key_parts(endpoint_slice)))

    def _read_context(self) -> ServiceContext:
        vips = nodeport_vips(self._cluster).get(self._tenant, ())
        return ServiceContext(external_ip_policy(self._cluster, self._tenant), nodeport_vips=vips)

    def context_changed(self) -> None:
        """Tenants, networks, nodes or the global settings have changed."""
        self._context_changed = True

    def follow(self, key: StoreKey) -> None:
        """Read a service or a slice of the cluster again."""
        parsed = parse_store_key(key)
        assert isinstance(parsed, ObjectKey)
        _, namespace, name, *rest = parsed.parts
        service = ServiceKey(namespace, name)
        if parsed.kind is kinds.KUBE_SERVICE:
            stored = self._cluster.get(kinds.KUBE_SERVICE, self._tenant, *service)
            self._follow_service(service, stored.value if stored else None)
            return
        found = self._cluster.get(kinds.KUBE_SLICE, self._tenant, *service, *rest)
        if found is None:
            self._services.remove_slice(service, rest[0])
            return
        try:
            self._services.put_slice(found.value)
        except Invalid as error:
            log.warning("ignoring invalid slice", key=key, reason=error.message)

    def _follow_service(self, key: ServiceKey, document: KubeService | None) -> None:
        # `ClusterDns` puts the cluster DNS service into the table of every tenant.
        if document is None or document.cluster_dns or document.foreign:
            self._services.remove_service(key)
        else:
            self._services.put_service(document)
        # The host reaches the cluster DNS service too.
        addresses = valid_cluster_ips(document) if document is not None and document.cluster_dns else ()
        items = {ExternalAddress(self._tenant, address, "host") for address in addresses}
        self._host_items.put(("cluster-dns", key), items)

    def take_changes(self) -> dict[str, dict[FrontendKey, Pool] | None]:
        """The pools of services that have changed, None for deleted ones."""
        # Reading the context looks at all tenants and networks: a tenant without services is spared that.
        if self._context_changed and self._services:
            self._context_changed = False
            self._context = self._read_context()
            self._services.set_context(self._context)
        pools: dict[str, dict[FrontendKey, Pool] | None] = {}
        for key, compiled in self._services.take_changes():
            pools[str(key)] = None if compiled is None else compiled.pools
            self._host_items.put(key, compiled.host_items if compiled else frozenset())
            self._log_faults(key, compiled.faults if compiled else ())
        if pools:
            vip = NodePortVip(self._tenant, self._context.nodeport_vips)
            self._host_items.put(None, {vip} if self._services else frozenset())
        return pools

    def _log_faults(self, key: ServiceKey, faults: tuple[str, ...]) -> None:
        """Log new faults only: a service is compiled again whenever one of its backends changes."""
        before = self._faults.pop(key, ())
        for fault in faults if faults != before else ():
            log.warning("ignoring invalid service", tenant=self._tenant, service=str(key), reason=fault)
        if faults:
            self._faults[key] = faults

    def refresh(self) -> Difference[HostAccessItem]:
        """The host items that have changed since the last call."""
        return self._host_items.refresh()

    def state_items(self) -> Iterator[HostAccessItem]:
        """All host items."""
        return self._host_items.state_items()


class ClusterDns:
    """The cluster DNS services as one tenant sees them: its own gateways, where netdns answers, are the backends."""

    def __init__(self, cluster: Cluster, tenant: TenantName) -> None:
        self._cluster = cluster
        self._tenant = tenant
        self._taken: frozenset[str] = frozenset()
        self._changed = True

    def changed(self) -> None:
        """Networks, or cluster DNS services, have changed."""
        self._changed = True

    def take_changes(self) -> dict[str, dict[FrontendKey, Pool] | None]:
        """The pools of all cluster DNS services if something has changed, None for deleted ones."""
        if not self._changed:
            return {}
        self._changed = False
        pools: dict[str, dict[FrontendKey, Pool] | None] = dict.fromkeys(self._taken)
        for document in self._cluster.all(kinds.KUBE_SERVICE):
            if document.cluster_dns:
                key = f"{document.namespace}/{document.name}"
                try:
                    pools[f"cluster-dns:{key}"] = cluster_dns_pools(document.service, self._gateways())
                except Invalid as error:
                    log.warning("ignoring invalid service", tenant=self._tenant, service=key, reason=error.message)
        self._taken = frozenset(name for name, found in pools.items() if found is not None)
        return pools

    def _gateways(self) -> list[Address]:
        return [
            gateway
            for network in self._cluster.networks(self._tenant)
            for family in (4, 6)
            if (gateway := ipam.gateway_of(network, family))
        ]


class TenantServices:
    """All services of one tenant. Other methods collect changes; `refresh` returns them."""

    def __init__(
        self,
        cluster: Cluster,
        tenant: TenantName,
        *,
        node: NodeName,
        attached: Iterable[model.Endpoint],
        index: KubeIndex,
    ) -> None:
        self._cluster = cluster
        self._node = node
        self._attached = {endpoint.key: endpoint for endpoint in attached}
        self._providers = Providers()
        self.kube = TenantKubeServices(cluster, tenant, node=node, cluster_ips=index.cluster_ips)
        self._table = LoadBalancerTable(tenant)
        self._cluster_dns = ClusterDns(cluster, tenant)
        for endpoint in cluster.all(kinds.ENDPOINT, tenant):
            self._update_endpoint(endpoint.key)
        for key in self._attached:
            self._update_endpoint(key)
        for service in cluster.all(kinds.SERVICE, tenant):
            self._put_service(service)

    def follow(self, key: StoreKey) -> None:
        """Read a service or an endpoint of the cluster again."""
        parsed = parse_store_key(key)
        if not isinstance(parsed, ObjectKey):
            return
        if parsed.kind.prefix in _KUBE_PREFIXES:
            self.kube.follow(key)
            return
        if parsed.kind is kinds.ENDPOINT:
            self._update_endpoint(parsed.endpoint)
            return
        if stored := self._cluster.get(kinds.SERVICE, *parsed.parts):
            self._put_service(stored.value)
        else:
            self._providers.remove_service(parsed.parts[-1])

    def _put_service(self, service: model.Service) -> None:
        try:
            self._providers.put_service(service)
        except Invalid as error:
            log.warning("ignoring invalid service", key=kinds.SERVICE.key_text(service), reason=error.message)

    def context_changed(self) -> None:
        """Tenants, networks, nodes, global settings or the cluster DNS service have changed."""
        self.kube.context_changed()
        self._cluster_dns.changed()

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        """An endpoint of this node is about to get its port."""
        self._attached[endpoint.key] = endpoint
        self._update_endpoint(endpoint.key)

    def remove_endpoint(self, key: EndpointKey) -> None:
        """An endpoint of this node is being detached."""
        self._attached.pop(key, None)
        self._update_endpoint(key)

    def _update_endpoint(self, key: EndpointKey) -> None:
        stored = self._cluster.covered_endpoint(key)
        attached = self._attached.get(key)
        known = attached if stored is None else stored
        if known is None or (known.host == self._node and attached is None):
            self._providers.remove_endpoint(key)
        else:
            self._providers.put_endpoint(known)

    def refresh(self) -> Difference[StateItem]:
        """The state items that have changed since the last call."""
        changes = (
            *self._providers.take_changes(),
            *self.kube.take_changes().items(),
            *self._cluster_dns.take_changes().items(),
        )
        for name, pools in changes:
            if pools is None:
                self._table.remove(name)
            else:
                self._table.put(name, pools)
        tenant, host = self._table.refresh(), self.kube.refresh()
        # The host sends connections into the tenant netns: its items come last and go first.
        return Difference((*tenant.put, *host.put), (*host.drop, *tenant.drop))

    def state_items(self) -> Iterator[StateItem]:
        """All state items."""
        yield from self._table.state_items()
        yield from self.kube.state_items()

    def port_of(self, frontend: FrontendKey, provider: Address) -> int:
        """The target port of a provider for a frontend; 0 when it is not a backend of it now."""
        return self._table.port_of(frontend, provider)


class Services:
    """A `DatapathFeature`: the services of every tenant with endpoints on this node."""

    def __init__(self, cluster: Cluster, *, node: NodeName, attachment_store: AttachmentStore) -> None:
        self._cluster = cluster
        self._node = node
        self._attachment_store = attachment_store
        self._index = KubeIndex(cluster)
        self._services: dict[TenantName, TenantServices] = {}
        # What the datapath still has of tenants that are gone, or whose services are computed again.
        self._former: dict[TenantName, frozenset[StateItem]] = {}
        # Set when services with a `healthCheckNodePort`, or their slices, may have changed.
        self.health_checks_changed = asyncio.Event()

    @property
    def by_tenant(self) -> Mapping[TenantName, TenantServices]:
        return self._services

    @property
    def exposed_tenants(self) -> frozenset[TenantName]:
        """Tenants whose services every node must serve, even without endpoints of theirs."""
        return self._index.exposed_tenants

    def health_checked(self) -> tuple[KubeService, ...]:
        """The services of all tenants that have a `healthCheckNodePort`."""
        return tuple(self._index.health_checked.values())

    def replace(self) -> None:
        self._index.replace()
        self.health_checks_changed.set()
        for tenant, services in self._services.items():
            self._former.setdefault(tenant, frozenset(services.state_items()))
        self._services.clear()

    def follow(self, key: StoreKey) -> None:
        folder, _, rest = key.partition("/")
        was_health_checked = self._index.is_health_checked(key)
        if folder in _CONTEXT_PREFIXES or (folder == kinds.KUBE_SERVICE.prefix and self._index.follow(key)):
            for tenant_services in self._services.values():
                tenant_services.context_changed()
        if folder in _PREFIXES and (services := self._services.get(TenantName(rest.partition("/")[0]))):
            services.follow(key)
        # Before and after: a service that has just lost its health check port must be closed.
        if was_health_checked or self._index.is_health_checked(key):
            self.health_checks_changed.set()

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        services = self._services.get(endpoint.tenant)
        if services is None:
            return self._add_tenant(endpoint.tenant)
        services.add_endpoint(endpoint)
        return services.refresh()

    def remove_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        services = self._services.get(endpoint.tenant)
        if services is None:
            return NOTHING
        services.remove_endpoint(endpoint.key)
        return services.refresh()

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        for gone in self._services.keys() - tenants:
            self._former[gone] = frozenset(self._services.pop(gone).state_items())
        # All other items of a tenant go with its netns.
        host_items = [
            item for gone in self._former.keys() - tenants for item in self._former.pop(gone) if is_host_scoped(item)
        ]
        return joined([Difference((), tuple(host_items)), *(self._refresh_one(tenant) for tenant in tenants)])

    def everything(self, tenants: Set[TenantName]) -> Iterator[StateItem]:
        self.refresh(tenants)
        return (item for services in self._services.values() for item in services.state_items())

    def _refresh_one(self, tenant: TenantName) -> Difference[StateItem]:
        known = self._services.get(tenant)
        return known.refresh() if known else self._add_tenant(tenant)

    def _add_tenant(self, tenant: TenantName) -> Difference[StateItem]:
        """Compute a tenant's services from now on. The datapath may have some of their items from before."""
        attached = (
            attachment.endpoint
            for attachment in self._attachment_store
            if attachment.key.tenant == tenant and attachment.stage in HAS_PORT
        )
        services = TenantServices(self._cluster, tenant, node=self._node, attached=attached, index=self._index)
        self._services[tenant] = services
        changes = services.refresh()
        former = self._former.pop(tenant, None)
        return changes if former is None else diff(frozenset(services.state_items()), former, rank=rank)
