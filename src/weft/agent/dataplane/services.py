"""The services of this node's tenants: who provides them, and the balancing tables that follow from that.

Endpoints are known from the store, with their labels of the moment. Those of this node provide only while they are
attached: from before their port speaks until it has gone silent, whatever the store says meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Set

from weft.agent.dataplane import kube_services
from weft.agent.dataplane.cluster_dns import NameService
from weft.agent.dataplane.features import NOTHING, joined
from weft.agent.dataplane.kube_services import KubeIndex, KubeTenant
from weft.agent.store.attachment_store import WIRED, AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.state import StateItem, rank
from weft.domain.errors import Invalid
from weft.domain.host_access.state import is_hosts
from weft.domain.ids import EndpointKey, NodeName, StoreKey, TenantName
from weft.domain.loadbalancer.kube_objects import KubeService
from weft.domain.loadbalancer.providers import Providers
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import BalancingTable
from weft.runtime.logs import Log

log = Log("services")

_FOLDERS = (kinds.SERVICE.prefix, kinds.ENDPOINT.prefix, *kube_services.FOLDERS)


class TenantServices:
    """The services of one tenant. Changes are gathered; `refresh` tells what they come to."""

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
        self.kube = KubeTenant(cluster, tenant, node=node, own=index.own)
        self._table = BalancingTable(tenant)
        self._names = NameService(cluster, tenant)
        for endpoint in cluster.all(kinds.ENDPOINT, tenant):
            self._put_endpoint(endpoint.key, endpoint)
        for key in self._attached:
            self._look_at(key)
        for service in cluster.all(kinds.SERVICE, tenant):
            self._put_service(service)

    def follow(self, key: StoreKey) -> None:
        """Take in a service or an endpoint of the cluster as it is now."""
        folder, *parts = key.split("/")
        if folder in kube_services.FOLDERS:
            self.kube.follow(key)
            return
        if folder == kinds.ENDPOINT.prefix:
            self._look_at(EndpointKey(*parts))  # type: ignore[arg-type]
            return
        if stored := self._cluster.get(kinds.SERVICE, *parts):
            self._put_service(stored.value)
        else:
            self._providers.remove_service(parts[-1])

    def _put_service(self, service: model.Service) -> None:
        try:
            self._providers.put_service(service)
        except Invalid as error:
            log.warning("service without effect", key=kinds.SERVICE.key_text(service), reason=error.message)

    def moved(self) -> None:
        """Tenants, networks or nodes are others now, or it is where names are asked for."""
        self.kube.moved()
        self._names.moved()

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        """A workload of this node is about to be wired."""
        self._attached[endpoint.key] = endpoint
        self._look_at(endpoint.key)

    def dismiss(self, key: EndpointKey) -> None:
        """A workload of this node is being taken off."""
        self._attached.pop(key, None)
        self._look_at(key)

    def _look_at(self, key: EndpointKey) -> None:
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        self._put_endpoint(key, None if stored is None else stored.value)

    def _put_endpoint(self, key: EndpointKey, stored: model.Endpoint | None) -> None:
        attached = self._attached.get(key)
        known = attached if stored is None else stored
        if known is None or (known.host == self._node and attached is None):
            self._providers.remove_endpoint(key)
        else:
            self._providers.put_endpoint(known)

    def refresh(self) -> Difference[StateItem]:
        """What the datapath is to be told since the last time."""
        for name, pools in (*self._providers.take(), *self.kube.take().items(), *self._names.take().items()):
            if pools is None:
                self._table.remove(name)
            else:
                self._table.put(name, pools)
        inside, host = self._table.refresh(), self.kube.refresh()
        return Difference((*inside.put, *host.put), (*host.drop, *inside.drop))

    def parts(self) -> Iterator[StateItem]:
        """All that the datapath has been told of."""
        yield from self._table.parts()
        yield from self.kube.parts()

    def port_of(self, front: FrontendKey, provider: Address) -> int:
        """Where a provider is asked for what comes to a front; 0 when it does not provide it now."""
        return self._table.port_of(front, provider)


class Services:
    """A topic (`weft.agent.dataplane.features`): the services of every tenant with workloads on this node."""

    def __init__(self, cluster: Cluster, *, node: NodeName, journal: AttachmentStore) -> None:
        self._cluster = cluster
        self._node = node
        self._journal = journal
        self._index = KubeIndex(cluster)
        self._services: dict[TenantName, TenantServices] = {}
        self._former: dict[TenantName, frozenset[StateItem]] = {}
        # Set when services whose health is asked for, or what is behind them, may be others than before.
        self.probes_changed = asyncio.Event()

    @property
    def by_tenant(self) -> Mapping[TenantName, TenantServices]:
        return self._services

    @property
    def open_tenants(self) -> frozenset[TenantName]:
        """Those whose services are asked at every node, whoever is on it."""
        return self._index.open_tenants

    def probed(self) -> tuple[KubeService, ...]:
        """The services of all tenants whose health is asked for at a port of every node."""
        return tuple(self._index.probed.values())

    def replace(self) -> None:
        self._index.replace()
        self.probes_changed.set()
        for tenant, services in self._services.items():
            self._former.setdefault(tenant, frozenset(services.parts()))
        self._services.clear()

    def follow(self, key: StoreKey) -> None:
        folder, _, rest = key.partition("/")
        was_probed = self._index.is_probed(key)
        if folder in kube_services.SURROUNDINGS or (folder == kinds.KUBE_SERVICE.prefix and self._index.follow(key)):
            for each in self._services.values():
                each.moved()
        if folder in _FOLDERS and (services := self._services.get(TenantName(rest.partition("/")[0]))):
            services.follow(key)
        if was_probed or self._index.is_probed(key):
            self.probes_changed.set()

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        services = self._services.get(endpoint.tenant)
        if services is None:
            return self._enter(endpoint.tenant)
        services.add_endpoint(endpoint)
        return services.refresh()

    def dismiss(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        services = self._services.get(endpoint.tenant)
        if services is None:
            return NOTHING
        services.dismiss(endpoint.key)
        return services.refresh()

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        for gone in self._services.keys() - tenants:
            self._former[gone] = frozenset(self._services.pop(gone).parts())
        # All else of a tenant goes with its space.
        left = [part for gone in self._former.keys() - tenants for part in self._former.pop(gone) if is_hosts(part)]
        return joined([Difference((), tuple(left)), *(self._refresh_one(tenant) for tenant in tenants)])

    def everything(self, tenants: Set[TenantName]) -> Iterator[StateItem]:
        self.refresh(tenants)
        return (part for services in self._services.values() for part in services.parts())

    def _refresh_one(self, tenant: TenantName) -> Difference[StateItem]:
        known = self._services.get(tenant)
        return known.refresh() if known else self._enter(tenant)

    def _enter(self, tenant: TenantName) -> Difference[StateItem]:
        """Keep a tenant's services from now on; the datapath may have a part of them from before."""
        attached = (note.endpoint for note in self._journal if note.key.tenant == tenant and note.stage in WIRED)
        services = TenantServices(self._cluster, tenant, node=self._node, attached=attached, index=self._index)
        self._services[tenant] = services
        changes = services.refresh()
        former = self._former.pop(tenant, None)
        return changes if former is None else diff(frozenset(services.parts()), former, rank=rank)
