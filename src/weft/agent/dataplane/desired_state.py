"""Cache of this node's desired state: marked stale by store changes, computed again on request.

Store events say only which objects to look at again. What to do follows from the difference of two sets: the desired
state items, and the items that the datapath got last.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from weft.agent.dataplane.host_access import HostAccess
from weft.agent.dataplane.policy import Policies
from weft.agent.dataplane.qos import QosProfiles
from weft.agent.dataplane.services import Services
from weft.agent.store.attachment_store import HAS_PORT, AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff, joined
from weft.domain.desired.segments import is_bridged, tags_of
from weft.domain.desired.state import (
    NOTHING,
    Port,
    RemoteItem,
    StateItem,
    TenantNetns,
    encap_item,
    network_prerequisites,
    plan_node_state,
    rank,
    remote_items_of,
)
from weft.domain.ids import NodeName, StoreKey, TenantName
from weft.domain.store_keys import AddressClaimKey, BlockKey, ObjectKey, parse_store_key
from weft.domain.store_types import NEVER, Change, Listing, Revision

# A change of one of these, or of an address block, may affect every state item of the node.
_NODE_WIDE = (kinds.NETWORK, kinds.NODE, kinds.GLOBAL)

_ENDPOINTS = kinds.ENDPOINT.store_prefix()

_KeyParts = tuple[str, ...]


class DatapathFeature(Protocol):
    """Computes the state items of one feature, such as policy, in time proportional to what has changed.

    It remembers what it has returned: differences build on each other. So the caller of a method hands its difference
    to the datapath before it awaits anything else. `tenants` are always all tenants with a netns on this node.
    """

    def replace(self) -> None:
        """The cluster was listed again: nothing that was known of it holds."""
        ...

    def follow(self, key: StoreKey) -> None:
        """An object of the cluster was put or deleted."""
        ...

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What to put together with the port of an endpoint of this node."""
        ...

    def remove_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What to put and drop when the port of an endpoint of this node is removed."""
        ...

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        """What has changed since the last difference."""
        ...

    def everything(self, tenants: Set[TenantName]) -> Iterable[StateItem]:
        """All state items of the feature; later differences build on them."""
        ...


class Features(NamedTuple):
    """The datapath features of one node, in the order in which their state items are put."""

    policies: Policies
    services: Services
    qos: QosProfiles
    host_access: HostAccess


def make_features(cluster: Cluster, *, node: NodeName, attachment_store: AttachmentStore) -> Features:
    return Features(
        policies=Policies(cluster, node=node, attachment_store=attachment_store),
        services=Services(cluster, node=node, attachment_store=attachment_store),
        qos=QosProfiles(cluster, attachment_store),
        host_access=HostAccess(cluster, node=node, attachment_store=attachment_store),
    )


class Update(NamedTuple):
    """The state items of the node after the next round, and the routes to remote endpoints among them that changed."""

    items: frozenset[StateItem]
    # None: more than single endpoints has changed, so the routes to all of them are indexed again.
    remotes: Mapping[_KeyParts, frozenset[RemoteItem]] | None


class DesiredState:
    """A subscriber of the store mirror, behind the cluster. Attachments, not store events, add and remove ports."""

    def __init__(
        self, cluster: Cluster, *, node: NodeName, attachment_store: AttachmentStore, features: Features
    ) -> None:
        self._cluster = cluster
        self._node = node
        self._attachment_store = attachment_store
        self._policies = features.policies
        self._services = features.services
        self._features: tuple[DatapathFeature, ...] = features
        # The items that the datapath got last, without ports and features.
        self._applied: frozenset[StateItem] = frozenset()
        # The index by endpoint makes a change of one remote endpoint independent of the number of endpoints.
        self._remotes: defaultdict[_KeyParts, frozenset[RemoteItem]] = defaultdict(frozenset)
        self._touched: set[_KeyParts] = set()
        self._all_touched = True
        # Tenants that have a network namespace on this node.
        self.tenants: frozenset[TenantName] = frozenset()
        # The newest revision that was received.
        self.revision: Revision = NEVER
        # Set when there may be something to apply.
        self.changed = asyncio.Event()
        # Set when a network is added, changed or deleted.
        self.networks_changed = asyncio.Event()

    @property
    def is_stale(self) -> bool:
        """Whether changes were received that no round has taken up yet."""
        return bool(self._touched) or self._all_touched

    @property
    def sync_request(self) -> Revision:
        """The newest request for a sync acknowledgement that was received."""
        return self._cluster.sync_request

    def replace(self, listing: Listing) -> None:
        self.revision = listing.revision
        for feature in self._features:
            feature.replace()
        self.networks_changed.set()
        self.mark_stale()

    def apply(self, change: Change) -> None:
        exposed_before = self._services.exposed_tenants
        # Our own commits arrive before the watch delivers older revisions.
        self.revision = max(self.revision, change.revision)
        # A claim changes with its endpoint. Alone, it may make or break the route of any endpoint.
        with_endpoint = any(event.key.startswith(_ENDPOINTS) for event in change.events)
        for event in change.events:
            for feature in self._features:
                feature.follow(event.key)
            parsed = parse_store_key(event.key)
            if isinstance(parsed, BlockKey) or (isinstance(parsed, AddressClaimKey) and not with_endpoint):
                self._all_touched = True
            if not isinstance(parsed, ObjectKey):
                continue
            kind, parts = parsed
            if kind is kinds.ENDPOINT:
                self._touched.add(parts)
            elif kind in _NODE_WIDE or (kind is kinds.SERVICE and is_bridged(self._cluster)):
                self._all_touched = True
            elif kind is kinds.GROUP:
                group = self._cluster.get(kinds.GROUP, *parts)
                # A group that is gone may have had a segment of its own.
                self._all_touched |= group is None or group.value.pkt_tag > 0
            if kind is kinds.NETWORK:
                self.networks_changed.set()
        # What a block or a claim has changed about endpoints that are not in this change.
        for key in self._cluster.cover_changed:
            for feature in self._features:
                feature.follow(key)
        self._all_touched |= self._services.exposed_tenants != exposed_before
        self.changed.set()

    def mark_stale(self) -> None:
        """More may have changed than the store events say."""
        self._all_touched = True
        self.changed.set()

    def take_update(self) -> Update:
        """The update since the last call. If applying it fails, the caller reads everything back."""
        self.changed.clear()
        touched, self._touched = self._touched, set()
        if self._all_touched or any(self._needs_segment(key) for key in touched):
            self._all_touched = False
            return self.full_update()
        remotes = {key: self._remotes_of(key) for key in touched}
        removed = {item for key in remotes for item in self._remotes[key]}
        added = {item for items in remotes.values() for item in items}
        # Most changes of endpoints, such as their labels, leave their routes alone: the very same set needs no diff.
        is_unchanged = removed <= added <= self._applied
        return Update(self._applied if is_unchanged else (self._applied - removed) | added, remotes)

    def full_update(self, extra: frozenset[StateItem] = frozenset()) -> Update:
        """All state items of the node, and `extra` for an attachment that is not in the store yet."""
        return Update(plan_node_state(self._cluster, self._node, self.local_tenants()) | extra, None)

    def take_difference(self, update: Update) -> Difference[StateItem]:
        """What the datapath has to put and drop. The caller hands it over at once: differences build on each other."""
        view = NOTHING
        if update.items is not self._applied:
            view = diff(update.items, self._applied, rank=rank)
            self.tenants = tenants_of(update.items)
        difference = joined([view, *(feature.refresh(self.tenants) for feature in self._features)])
        self._await_policies()
        return difference

    def note_applied(self, update: Update) -> None:
        """The datapath has taken over the update."""
        self._applied = update.items
        if update.remotes is None:
            self._remotes = defaultdict(frozenset, self._all_remotes())
        else:
            self._remotes.update(update.remotes)

    def take_everything(self) -> tuple[Update, set[StateItem]]:
        """A full update, and with it all that the datapath must have, including ports and features."""
        self.changed.clear()
        self._touched.clear()
        self._all_touched = False
        update = self.full_update()
        self._applied, self.tenants = update.items, tenants_of(update.items)
        everything = {*update.items, *self._ports()}
        everything.update(*(feature.everything(self.tenants) for feature in self._features))
        self._await_policies()
        return update, everything

    def _await_policies(self) -> None:
        if not self._policies.is_current(self.tenants):
            self.changed.set()  # policies changed while others were computed: the next round has them

    async def compute_policies(self, tenants: Set[TenantName] = frozenset()) -> None:
        """Return when the policies known at the call are computed, of these tenants or of all on this node."""
        await self._policies.compute(tenants or self.local_tenants() | self.tenants)

    def policies_idle(self) -> AbstractAsyncContextManager[None]:
        """In the block no thread computes policies, until its first await; `take_everything` needs that."""
        return self._policies.idle()

    def on_late_policy(self, notify: Callable[[TenantName], None]) -> None:
        """Have a function called with a tenant whose policy changed later than the cluster."""
        self._policies.on_late_change.append(notify)

    async def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What to put with the endpoint's port, when its policy is computed. To be handed over before any await."""
        policy = await self._policies.attach(endpoint)
        return joined([policy, *(each.add_endpoint(endpoint) for each in self._features if each is not self._policies)])

    async def remove_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What to put and drop with the endpoint's port; as `add_endpoint`."""
        policy = await self._policies.detach(endpoint)
        others = (each for each in self._features if each is not self._policies)
        return joined([policy, *(each.remove_endpoint(endpoint) for each in others)])

    def network_items(self, network: model.Network, group: str) -> frozenset[StateItem]:
        """What a port of the network and group stands on: the tenant's netns, the segment and its gateways."""
        return frozenset(network_prerequisites(self._cluster, network, group))

    def is_applied(self, items: frozenset[StateItem]) -> bool:
        return self._applied.issuperset(items)

    def local_tenants(self) -> frozenset[TenantName]:
        """Tenants with endpoints on this node, and tenants whose services every node must serve."""
        return frozenset(each.endpoint.tenant for each in self._attachment_store) | self._services.exposed_tenants

    @property
    def has_unknown_ports(self) -> bool:
        """Whether ports may exist whose record is lost: what is not desired is not to be removed."""
        return self._attachment_store.is_damaged

    def attached_ports(self) -> set[Port]:
        """The ports of endpoints whose ADD has ended."""
        return {each.config.port for each in self._attachment_store if each.config and each.stage is Stage.ATTACHED}

    def _ports(self) -> Iterator[Port]:
        """The ports that exist, or may be half made: a sweep must not remove them."""
        return (each.config.port for each in self._attachment_store if each.config and each.stage in HAS_PORT)

    def _needs_segment(self, key: _KeyParts) -> bool:
        """Whether an endpoint is in a network of a local tenant that has no overlay or VLAN on this node yet."""
        tenant, network, _ = key
        stored, endpoint = self._cluster.get(kinds.NETWORK, tenant, network), self._cluster.get(kinds.ENDPOINT, *key)
        if stored is None or TenantNetns(TenantName(tenant)) not in self._applied:
            return False
        tags = tags_of(self._cluster, stored.value, endpoint.value.group if endpoint else "")
        return tags is not None and encap_item(TenantName(tenant), tags) not in self._applied

    def _remotes_of(self, key: _KeyParts) -> frozenset[RemoteItem]:
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        if stored is None or TenantNetns(stored.value.tenant) not in self._applied:
            return frozenset()
        return frozenset(remote_items_of(self._cluster, self._node, stored.value))

    def _all_remotes(self) -> Iterator[tuple[_KeyParts, frozenset[RemoteItem]]]:
        for tenant in tenants_of(self._applied):
            for endpoint in self._cluster.all(kinds.ENDPOINT, tenant):
                if endpoint.host != self._node:
                    yield tuple(endpoint.key), frozenset(remote_items_of(self._cluster, self._node, endpoint))


def tenants_of(items: Iterable[StateItem]) -> frozenset[TenantName]:
    """The tenants that have a network namespace among these state items."""
    return frozenset(item.tenant for item in items if isinstance(item, TenantNetns))
