"""Kubernetes' services on this node: those of one tenant, and what has to be known of all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator

from weft.domain import kinds
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference
from weft.domain.errors import Invalid
from weft.domain.host_access.nodeport_vips import doors
from weft.domain.host_access.refcounts import Openings
from weft.domain.host_access.state import ExternalAddress, HostPart, NodePortVip
from weft.domain.ids import NodeName, StoreKey, TenantName
from weft.domain.loadbalancer.external_ips import outer_rules
from weft.domain.loadbalancer.kube_objects import KubeService
from weft.domain.loadbalancer.kube_services import KubeServices, ServiceKey, Surroundings, known_addresses
from weft.domain.loadbalancer.kubernetes import is_outward
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool
from weft.runtime.logs import Log

log = Log("services")

FOLDERS = (kinds.KUBE_SERVICE.prefix, kinds.KUBE_SLICE.prefix)
SURROUNDINGS = (kinds.TENANT.prefix, kinds.NETWORK.prefix, kinds.NODE.prefix, kinds.GLOBAL.prefix)


class KubeIndex:
    """Of all tenants' services: their own addresses, and which tenants have some that every node must answer for."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.replace()

    def replace(self) -> None:
        """Read the cluster anew."""
        self._known: dict[StoreKey, tuple[TenantName, tuple[Address, ...], bool]] = {}
        self._outward: Counter[TenantName] = Counter()
        self.own: Counter[Address] = Counter()
        self._names: set[StoreKey] = set()
        self.probed: dict[StoreKey, KubeService] = {}
        for document in self._cluster.all(kinds.KUBE_SERVICE):
            self.follow(kinds.KUBE_SERVICE.store_key(*kinds.KUBE_SERVICE.key_parts(document)))

    def follow(self, key: StoreKey) -> bool:
        """Take in a service as it is now; whether it answers names, or has done so until now."""
        did_answer = key in self._names
        self._names.discard(key)
        self.probed.pop(key, None)
        if before := self._known.pop(key, None):
            self._count(*before, by=-1)
        stored = self._cluster.get(kinds.KUBE_SERVICE, *key.split("/")[1:])
        if stored is not None:
            document = stored.value
            outward = document.shared or document.names or is_outward(document.service)
            outward &= not document.foreign
            known = document.tenant, known_addresses(document), outward
            self._known[key] = known
            self._count(*known, by=1)
            if document.names:
                self._names.add(key)
            if document.service.spec.health_check_node_port and not document.foreign:
                self.probed[key] = document
        return did_answer or key in self._names

    def is_probed(self, key: StoreKey) -> bool:
        """Whether a service, or that of a slice, has a port at which its health is asked for."""
        folder, *parts = key.split("/")
        return folder in FOLDERS and kinds.KUBE_SERVICE.store_key(*parts[:3]) in self.probed

    def _count(self, tenant: TenantName, own: Iterable[Address], outward: bool, *, by: int) -> None:
        self._outward[tenant] += by * outward
        for address in own:
            self.own[address] += by
            if not self.own[address]:
                del self.own[address]

    @property
    def open_tenants(self) -> frozenset[TenantName]:
        """Those that are reached from outside, or by others, at every node."""
        open_ones = (tenant for tenant, count in self._outward.items() if count)
        return frozenset(tenant for tenant in open_ones if self._cluster.get(kinds.TENANT, tenant))


class KubeTenant:
    """The services of one tenant: what the balancing table is to be told, and what the host is."""

    def __init__(self, cluster: Cluster, tenant: TenantName, *, node: NodeName, own: Container[Address]) -> None:
        self._cluster = cluster
        self._tenant = tenant
        self._surroundings = Surroundings()
        self._services = KubeServices(node=node, surroundings=self._surroundings, own=own)
        self._is_moved = True
        self._openings = Openings()
        self._faults: dict[ServiceKey, tuple[str, ...]] = {}
        for service in cluster.all(kinds.KUBE_SERVICE, tenant):
            self.follow(kinds.KUBE_SERVICE.store_key(*kinds.KUBE_SERVICE.key_parts(service)))
        for piece in cluster.all(kinds.KUBE_SLICE, tenant):
            self.follow(kinds.KUBE_SLICE.store_key(*kinds.KUBE_SLICE.key_parts(piece)))

    def _look_around(self) -> Surroundings:
        own_doors = doors(self._cluster).get(self._tenant, ())
        return Surroundings(rules=outer_rules(self._cluster, self._tenant), doors=own_doors)

    def moved(self) -> None:
        """Tenants, networks or nodes are others now."""
        self._is_moved = True

    def follow(self, key: StoreKey) -> None:
        """Take in a service or a slice of the cluster as it is now."""
        folder, _, namespace, name, *rest = key.split("/")
        service = ServiceKey(namespace, name)
        if folder == kinds.KUBE_SERVICE.prefix:
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
            log.warning("slice without effect", key=key, reason=error.message)

    def _follow_service(self, key: ServiceKey, document: KubeService | None) -> None:
        # Those that answer names are in the table of every tenant by themselves.
        if document is None or document.names or document.foreign:
            self._services.remove_service(key)
        else:
            self._services.put_service(document)
        asked = known_addresses(document) if document is not None and document.names else ()
        self._openings.put(("names", key), {ExternalAddress(self._tenant, address, "host") for address in asked})

    def take(self) -> dict[str, dict[FrontendKey, Pool] | None]:
        """The pools of services that have changed, None for those that are no more."""
        if self._is_moved and self._services:  # it is not for nothing: all tenants and networks are looked at
            self._is_moved = False
            self._surroundings = self._look_around()
            self._services.surround(self._surroundings)
        pools: dict[str, dict[FrontendKey, Pool] | None] = {}
        for key, view in self._services.take():
            pools[str(key)] = None if view is None else view.pools
            self._openings.put(key, view.openings if view else frozenset())
            self._tell_faults(key, view.faults if view else ())
        if pools:
            door = NodePortVip(self._tenant, self._surroundings.doors)
            self._openings.put(None, {door} if self._services else frozenset())
        return pools

    def _tell_faults(self, key: ServiceKey, faults: tuple[str, ...]) -> None:
        """Once, and not with every backend that comes or goes."""
        before = self._faults.pop(key, ())
        for fault in faults if faults != before else ():
            log.warning("service without effect", tenant=self._tenant, service=str(key), reason=fault)
        if faults:
            self._faults[key] = faults

    def refresh(self) -> Difference[HostPart]:
        """What the host is to be told since the last time."""
        return self._openings.refresh()

    def parts(self) -> Iterator[HostPart]:
        """All that the host has been told of."""
        return self._openings.parts()
