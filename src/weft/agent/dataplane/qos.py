"""What profiles, and the wishes of callers, make of this node's workloads, as a topic (`weft.agent.dataplane.features`)."""

from __future__ import annotations

from collections.abc import Set

from weft.agent.dataplane.features import NOTHING
from weft.agent.store.attachment_store import WIRED, AttachmentStore
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.state import NO_RATES, QosProfile, StateItem, rank, shape_of, wished_shape
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointKey, StoreKey, TenantName
from weft.runtime.logs import Log

log = Log("profiles")


_FOLDERS = (kinds.GROUP.prefix, kinds.PROFILE.prefix)


class Profiles:
    """The shapes that the datapath has been told of. Nothing is computed until a group or a profile has changed."""

    def __init__(self, cluster: Cluster, journal: AttachmentStore) -> None:
        self._cluster = cluster
        self._journal = journal
        self._told: dict[EndpointKey, QosProfile] = {}
        self._touched = True

    def replace(self) -> None:
        self._touched = True

    def follow(self, key: StoreKey) -> None:
        self._touched |= key.partition("/")[0] in _FOLDERS

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        self.dismiss(endpoint)
        shape = self._shape_of(endpoint)
        if shape is None:
            return NOTHING
        self._told[endpoint.key] = shape
        return Difference((shape,), ())

    def dismiss(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """Its shape goes with its port: there is nothing to tell."""
        self._told.pop(endpoint.key, None)
        return NOTHING

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        if not self._touched:
            return NOTHING
        before: frozenset[StateItem] = frozenset(self._told.values())
        return diff(self.everything(tenants), before, rank=rank)

    def everything(self, tenants: Set[TenantName]) -> frozenset[StateItem]:
        self._touched = False
        self._told = {}
        for note in self._journal:
            if note.key.tenant in tenants and note.stage in WIRED and (shape := self._shape_of(note.endpoint)):
                self._told[note.key] = shape
        return frozenset(self._told.values())

    def _shape_of(self, endpoint: model.Endpoint) -> QosProfile | None:
        note = self._journal.get(endpoint.key)
        wish = note.wiring.rates if note and note.wiring else NO_RATES
        try:
            return shape_of(self._cluster, endpoint, wish)
        except Invalid as error:
            log.warning("profile without effect", endpoint=endpoint.key, reason=error.message)
            return wished_shape(endpoint, wish)
