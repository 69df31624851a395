"""Policy as a datapath feature: one policy engine and policy map per tenant with endpoints on this node.

Endpoints of other nodes come from the store. Those of this node come from their attachment: they are in the engine
before their port is opened and until it is removed, whatever the store says in the meantime.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any

from weft.agent.store.attachment_store import HAS_PORT, AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address, Range
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff, joined
from weft.domain.desired.state import NOTHING, StateItem, rank
from weft.domain.dns.names import Transports
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointKey, NodeName, StoreKey, TenantName
from weft.domain.ipam import ipam
from weft.domain.kinds import Kind
from weft.domain.lifecycle.changes.endpoints import is_same
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import (
    SHARED_KINDS,
    SHARED_PREFIXES,
    TENANT_KINDS,
    TENANT_PREFIXES,
    keys_to_sync,
    sync_object,
)
from weft.domain.policy.explain.dns_egress import dns_egress_denied_by
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import PolicyItem
from weft.domain.store_keys import ObjectKey, parse_store_key
from weft.runtime.logs import Log

log = Log("policy")


class TenantPolicy:
    """The policy of one tenant. `refresh` returns the changes that the other methods have collected."""

    def __init__(
        self, cluster: Cluster, tenant: TenantName, *, node: NodeName, attached: Iterable[model.Endpoint]
    ) -> None:
        self._cluster = cluster
        self._node = node
        # Endpoints of this node that have a port, or are about to get one.
        self._local: dict[EndpointKey, model.Endpoint] = {}
        # Whether the engine has the endpoints of other nodes: without policies they do not matter, and cost memory.
        self._has_remote = False
        self._engine = Engine()
        self.policy_map = PolicyMap(self._engine, tenant=tenant, node=node)
        self._tenant = tenant
        for endpoint in attached:
            self.add_endpoint(endpoint)
        for kind in TENANT_KINDS:
            if kind is not kinds.ENDPOINT:
                self._follow_all(kind)
        for kind in SHARED_KINDS:
            for key in keys_to_sync(cluster, kind):
                self.follow(key)
        self._update_subnets()

    @property
    def engine(self) -> Engine:
        """The engine, with the endpoints of all nodes."""
        self._add_remote_endpoints()
        return self._engine

    def dns_egress_denied(self, endpoint: model.Endpoint, resolvers: Collection[Address]) -> Transports:
        """By which transports policy denies an endpoint of this node DNS to every resolver."""
        return dns_egress_denied_by(self._engine, node=self._node, resolvers=resolvers)(endpoint)

    def _add_remote_endpoints(self) -> None:
        if not self._has_remote:
            self._has_remote = True
            self._follow_all(kinds.ENDPOINT)

    def _follow_all(self, kind: Kind[Any]) -> None:
        for key in keys_to_sync(self._cluster, kind, self._tenant):
            self.follow(key)

    def follow(self, key: StoreKey) -> None:
        """Read an object of the cluster again."""
        parsed = parse_store_key(key)
        if not isinstance(parsed, ObjectKey):
            return
        if parsed.kind is kinds.ENDPOINT:
            endpoint = parsed.endpoint
            if endpoint in self._local:
                self._update_labels(endpoint)
            if not self._has_remote or self._is_local(endpoint):
                return
        elif parsed.kind in (kinds.POLICY, kinds.KUBE_POLICY):
            self._add_remote_endpoints()
        try:
            self.policy_map.note(sync_object(self._engine, self._cluster, key))
        except Invalid as error:
            log.warning("ignoring invalid object", key=key, reason=error.message)
        if parsed.kind is kinds.NETWORK:
            self._update_subnets()

    def _update_labels(self, key: EndpointKey) -> None:
        """The store has the current labels of a local endpoint. Everything else comes from its attachment."""
        if (known := self._with_stored_labels(self._local[key])) != self._local[key]:
            self._local[key] = known
            self.policy_map.note(self._engine.put(known))

    def _with_stored_labels(self, endpoint: model.Endpoint) -> model.Endpoint:
        stored = self._cluster.get(kinds.ENDPOINT, *endpoint.key)
        # Another endpoint may have the same key: one that was deleted here and not in the store yet.
        return stored.value if stored is not None and is_same(stored.value, endpoint) else endpoint

    def _is_local(self, key: EndpointKey) -> bool:
        """Whether an endpoint is this node's, so that its attachment counts and not the store."""
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        return key in self._local or (stored is not None and stored.value.host == self._node)

    def _update_subnets(self) -> None:
        """Set the tenant's subnets: an address in them without an endpoint is an unknown identity, not the world."""
        subnets: list[Range] = []
        gateways: list[Address] = []
        for network in self._cluster.networks(self._tenant):
            for family in (4, 6):
                if subnet := ipam.subnet_of(network, family):
                    subnets.append(subnet.whole)
                if gateway := ipam.gateway_of(network, family):
                    gateways.append(gateway)
        self.policy_map.set_tenant_subnets(subnets, gateways)

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        """An endpoint of this node is about to get its port."""
        self._local[endpoint.key] = known = self._with_stored_labels(endpoint)
        self.policy_map.note(self._engine.put(known))

    def remove_endpoint(self, key: EndpointKey) -> None:
        """An endpoint of this node is being detached."""
        self._local.pop(key, None)
        self.policy_map.note(self._engine.remove_endpoint(key))

    def refresh(self) -> Difference[PolicyItem]:
        """The changes of the policy map since the last call."""
        return self.policy_map.refresh()


class Policies:
    """A `DatapathFeature`: the policy of every tenant with endpoints on this node."""

    def __init__(self, cluster: Cluster, *, node: NodeName, attachment_store: AttachmentStore) -> None:
        self._cluster = cluster
        self._node = node
        self._attachment_store = attachment_store
        self._policies: dict[TenantName, TenantPolicy] = {}
        # After a new listing: what the datapath still has of a tenant whose policy is computed again.
        self._former: dict[TenantName, Set[PolicyItem]] = {}

    @property
    def by_tenant(self) -> Mapping[TenantName, TenantPolicy]:
        return self._policies

    def replace(self) -> None:
        for tenant, policy in self._policies.items():
            self._former.setdefault(tenant, policy.policy_map.state_items)
        self._policies.clear()

    def follow(self, key: StoreKey) -> None:
        folder, _, rest = key.partition("/")
        if folder in SHARED_PREFIXES:
            for policy in self._policies.values():
                policy.follow(key)
        elif folder in TENANT_PREFIXES and (found := self._policies.get(TenantName(rest.partition("/")[0]))):
            found.follow(key)

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        policy = self._policies.get(endpoint.tenant)
        if policy is None:
            return self._add_tenant(endpoint.tenant)
        policy.add_endpoint(endpoint)
        return _as_state_items(policy.refresh())

    def remove_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        policy = self._policies.get(endpoint.tenant)
        if policy is None:
            return NOTHING
        policy.remove_endpoint(endpoint.key)
        return _as_state_items(policy.refresh())

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        for table in (self._policies, self._former):
            for gone in table.keys() - tenants:
                del table[gone]
        return joined(self._refresh_one(tenant) for tenant in tenants)

    def everything(self, tenants: Set[TenantName]) -> Iterator[StateItem]:
        self.refresh(tenants)
        return (item for policy in self._policies.values() for item in policy.policy_map.state_items)

    def _refresh_one(self, tenant: TenantName) -> Difference[StateItem]:
        known = self._policies.get(tenant)
        return _as_state_items(known.refresh()) if known else self._add_tenant(tenant)

    def _add_tenant(self, tenant: TenantName) -> Difference[StateItem]:
        """Compute a tenant's policy from now on. The datapath may have some of its items from before."""
        attached = (
            attachment.endpoint
            for attachment in self._attachment_store
            if attachment.key.tenant == tenant and attachment.stage in HAS_PORT
        )
        policy = TenantPolicy(self._cluster, tenant, node=self._node, attached=attached)
        self._policies[tenant] = policy
        changes = policy.refresh()
        former = self._former.pop(tenant, None)
        return _as_state_items(changes if former is None else diff(policy.policy_map.state_items, former, rank=rank))


def _as_state_items(changes: Difference[PolicyItem]) -> Difference[StateItem]:
    return changes  # type: ignore[return-value]  # a policy item is a state item
