"""Where pods of a tenant ask for names by a service of Kubernetes (`weft.domain.loadbalancer.cluster_dns`)."""

from __future__ import annotations

from weft.domain import kinds
from weft.domain.addresses import Address
from weft.domain.cluster import Cluster
from weft.domain.errors import Invalid
from weft.domain.ids import TenantName
from weft.domain.ipam import ipam
from weft.domain.loadbalancer.cluster_dns import pools_for_names
from weft.domain.loadbalancer.state import FrontendKey
from weft.domain.loadbalancer.table import Pool
from weft.runtime.logs import Log

log = Log("services")


class NameService:
    """The services that answer names, seen from one tenant. `take` tells what has changed."""

    def __init__(self, cluster: Cluster, tenant: TenantName) -> None:
        self._cluster = cluster
        self._tenant = tenant
        self._told: frozenset[str] = frozenset()
        self._is_moved = True

    def moved(self) -> None:
        """Networks, or services that answer names, are others now."""
        self._is_moved = True

    def take(self) -> dict[str, dict[FrontendKey, Pool] | None]:
        """The pools of such services when something has changed, None for those that are no more."""
        if not self._is_moved:
            return {}
        self._is_moved = False
        pools: dict[str, dict[FrontendKey, Pool] | None] = dict.fromkeys(self._told)
        for document in self._cluster.all(kinds.KUBE_SERVICE):
            if document.names:
                try:
                    found = pools_for_names(document.service, self._gateways())
                except Invalid as error:
                    key = f"{document.namespace}/{document.name}"
                    log.warning("service without effect", tenant=self._tenant, service=key, reason=error.message)
                else:
                    pools[f"names:{document.namespace}/{document.name}"] = found
        self._told = frozenset(name for name, found in pools.items() if found is not None)
        return pools

    def _gateways(self) -> list[Address]:
        return [
            gateway
            for network in self._cluster.networks(self._tenant)
            for family in (4, 6)
            if (gateway := ipam.gateway_of(network, family))
        ]
