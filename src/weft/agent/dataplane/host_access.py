"""How this node's host and its tenants reach each other and the world, as a topic (`weft.agent.dataplane.features`)."""

from __future__ import annotations

from collections.abc import Iterator, Set

from weft.agent.dataplane.features import NOTHING
from weft.agent.store.attachment_store import WIRED, AttachmentStore
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.state import StateItem, rank
from weft.domain.host_access.state import TenantSnat
from weft.domain.host_access.view import HostReachableEndpoint, host_view
from weft.domain.ids import EndpointKey, NetworkKey, NetworkName, NodeName, StoreKey, TenantName

_FOLDERS = (kinds.NETWORK.prefix, kinds.NODE.prefix, kinds.GLOBAL.prefix)
_USES = (kinds.ENDPOINT.prefix, kinds.BLOCKS)


class HostAccess:
    """What the datapath has been told. A workload matters only where it has ports of the host or is in disguise."""

    def __init__(self, cluster: Cluster, *, node: NodeName, journal: AttachmentStore) -> None:
        self._cluster = cluster
        self._node = node
        self._journal = journal
        self._tenants: frozenset[TenantName] = frozenset()
        self._told: frozenset[StateItem] = frozenset()
        self._touched = True

    def replace(self) -> None:
        self._touched = True

    def follow(self, key: StoreKey) -> None:
        folder, _, rest = key.partition("/")
        self._touched |= folder in _FOLDERS or (folder in _USES and self._opens(rest))

    def _opens(self, rest: str) -> bool:
        """Whether what has come or gone may be the first or the last of its network, and so the overlay with it."""
        tenant, network, _ = rest.split("/")
        key, cluster = NetworkKey(TenantName(tenant), NetworkName(network)), self._cluster
        users = len(cluster.by_network.get(key, ())) + len(cluster.blocks.get(key, ()))
        return key.tenant in self._tenants and users <= 1

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        if not self._matters(endpoint):
            return NOTHING
        return self._look([*self._guests(without=endpoint.key), self._guest(endpoint)])

    def dismiss(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        if not self._matters(endpoint):
            return NOTHING
        return self._look([*self._guests(without=endpoint.key)])

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        if not self._touched and tenants == self._tenants:
            return NOTHING
        self._touched, self._tenants = False, frozenset(tenants)
        return self._look([*self._guests()])

    def everything(self, tenants: Set[TenantName]) -> frozenset[StateItem]:
        self._touched = True
        self.refresh(tenants)
        return self._told

    def _look(self, guests: list[HostReachableEndpoint]) -> Difference[StateItem]:
        before, self._told = self._told, host_view(self._cluster, self._node, self._tenants, guests)
        return diff(self._told, before, rank=rank)

    def _matters(self, endpoint: model.Endpoint) -> bool:
        disguised = any(isinstance(part, TenantSnat) and part.tenant == endpoint.tenant for part in self._told)
        return disguised or bool(self._guest(endpoint).ports)

    def _guests(self, *, without: EndpointKey | None = None) -> Iterator[HostReachableEndpoint]:
        for note in self._journal:
            if note.stage in WIRED and note.key != without:
                yield self._guest(note.endpoint)

    def _guest(self, endpoint: model.Endpoint) -> HostReachableEndpoint:
        note = self._journal.get(endpoint.key)
        return HostReachableEndpoint(endpoint, note.wiring.ports if note and note.wiring else ())
