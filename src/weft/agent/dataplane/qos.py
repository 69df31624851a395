"""QoS as a datapath feature: profiles of this node's endpoints, from their groups and the requests of CNI callers."""

from __future__ import annotations

from collections.abc import Set

from weft.agent.store.attachment_store import HAS_PORT, AttachmentStore
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.state import (
    NO_LIMITS,
    NOTHING,
    QosProfile,
    StateItem,
    qos_profile_of,
    rank,
    requested_qos_profile,
)
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointKey, StoreKey, TenantName
from weft.runtime.logs import Log

log = Log("qos")

_PREFIXES = (kinds.GROUP.prefix, kinds.PROFILE.prefix)


class QosProfiles:
    """The QoS profile of each endpoint. All are computed again when a group or a profile has changed."""

    def __init__(self, cluster: Cluster, attachment_store: AttachmentStore) -> None:
        self._cluster = cluster
        self._attachment_store = attachment_store
        self._profiles: dict[EndpointKey, QosProfile] = {}
        self._touched = True

    def replace(self) -> None:
        self._touched = True

    def follow(self, key: StoreKey) -> None:
        self._touched |= key.partition("/")[0] in _PREFIXES

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        self.remove_endpoint(endpoint)
        profile = self._profile_of(endpoint)
        if profile is None:
            return NOTHING
        self._profiles[endpoint.key] = profile
        return Difference((profile,), ())

    def remove_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """Its profile goes with its port: the datapath needs no difference."""
        self._profiles.pop(endpoint.key, None)
        return NOTHING

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        if not self._touched:
            return NOTHING
        before: frozenset[StateItem] = frozenset(self._profiles.values())
        return diff(self.everything(tenants), before, rank=rank)

    def everything(self, tenants: Set[TenantName]) -> frozenset[StateItem]:
        self._touched = False
        self._profiles = {}
        for attachment in self._attachment_store:
            if attachment.key.tenant not in tenants or attachment.stage not in HAS_PORT:
                continue
            if profile := self._profile_of(attachment.endpoint):
                self._profiles[attachment.key] = profile
        return frozenset(self._profiles.values())

    def _profile_of(self, endpoint: model.Endpoint) -> QosProfile | None:
        attachment = self._attachment_store.get(endpoint.key)
        requested = attachment.config.rates if attachment and attachment.config else NO_LIMITS
        try:
            return qos_profile_of(self._cluster, endpoint, requested)
        except Invalid as error:
            # The limits that the runtime has requested apply all the same.
            log.warning("ignoring invalid profile", endpoint=endpoint.key, reason=error.message)
            return requested_qos_profile(endpoint, requested)
