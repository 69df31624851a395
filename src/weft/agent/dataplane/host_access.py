"""Host access as a datapath feature: NAT and routes between the host, its tenants and external networks."""

from __future__ import annotations

from collections.abc import Iterator, Set

from weft.agent.store.attachment_store import HAS_PORT, AttachmentStore
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.state import NOTHING, StateItem, rank
from weft.domain.host_access.state import TenantSnat
from weft.domain.host_access.view import HostReachableEndpoint, plan_host_access
from weft.domain.ids import EndpointKey, NetworkKey, NodeName, StoreKey, TenantName
from weft.domain.store_keys import BlockKey, ObjectKey, parse_store_key

_NODE_WIDE = (kinds.NETWORK, kinds.NODE, kinds.GLOBAL)


class HostAccess:
    """The host access items of this node. They depend on endpoints only for host ports and SNAT."""

    def __init__(self, cluster: Cluster, *, node: NodeName, attachment_store: AttachmentStore) -> None:
        self._cluster = cluster
        self._node = node
        self._attachment_store = attachment_store
        self._tenants: frozenset[TenantName] = frozenset()
        # What was returned last: differences are against it.
        self._items: frozenset[StateItem] = frozenset()
        # Whether something has changed that affects more than single endpoints.
        self._touched = True

    def replace(self) -> None:
        self._touched = True

    def follow(self, key: StoreKey) -> None:
        parsed = parse_store_key(key)
        if isinstance(parsed, ObjectKey) and parsed.kind in _NODE_WIDE:
            self._touched = True
        elif isinstance(parsed, BlockKey) or (isinstance(parsed, ObjectKey) and parsed.kind is kinds.ENDPOINT):
            self._touched |= self._opens_or_closes(parsed.network)

    def _opens_or_closes(self, network: NetworkKey) -> bool:
        """Whether the network may have got its first user or lost its last, and its overlay with it."""
        users = len(self._cluster.by_network.get(network, ())) + len(self._cluster.blocks.get(network, ()))
        return network.tenant in self._tenants and users <= 1

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        if not self._matters(endpoint):
            return NOTHING
        return self._plan([*self._endpoints(without=endpoint.key), self._reachable(endpoint)])

    def remove_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        if not self._matters(endpoint):
            return NOTHING
        return self._plan([*self._endpoints(without=endpoint.key)])

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        if not self._touched and tenants == self._tenants:
            return NOTHING
        self._touched, self._tenants = False, frozenset(tenants)
        return self._plan([*self._endpoints()])

    def everything(self, tenants: Set[TenantName]) -> frozenset[StateItem]:
        self._touched = True
        self.refresh(tenants)
        return self._items

    def _plan(self, endpoints: list[HostReachableEndpoint]) -> Difference[StateItem]:
        before, self._items = self._items, plan_host_access(self._cluster, self._node, self._tenants, endpoints)
        return diff(self._items, before, rank=rank)

    def _matters(self, endpoint: model.Endpoint) -> bool:
        has_snat = any(isinstance(item, TenantSnat) and item.tenant == endpoint.tenant for item in self._items)
        return has_snat or bool(self._reachable(endpoint).ports)

    def _endpoints(self, *, without: EndpointKey | None = None) -> Iterator[HostReachableEndpoint]:
        for attachment in self._attachment_store:
            if attachment.stage in HAS_PORT and attachment.key != without:
                yield self._reachable(attachment.endpoint)

    def _reachable(self, endpoint: model.Endpoint) -> HostReachableEndpoint:
        attachment = self._attachment_store.get(endpoint.key)
        return HostReachableEndpoint(endpoint, attachment.config.ports if attachment and attachment.config else ())
