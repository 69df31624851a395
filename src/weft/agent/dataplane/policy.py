"""Policy on this node, tenant by tenant: the engine that follows the cluster, and the tables the datapath looks up.

Workloads of other nodes are known from the store. Those of this node are known from their attachment: they are admitted
before their port speaks and dismissed when it has gone silent, whatever the store says meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from typing import Any

from weft.agent.dataplane.features import NOTHING, joined
from weft.agent.store.attachment_store import WIRED, AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address, Range
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.state import StateItem, rank
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointKey, NodeName, StoreKey, TenantName
from weft.domain.ipam import ipam
from weft.domain.kinds import Kind
from weft.domain.lifecycle.changes.endpoints import is_same
from weft.domain.policy.engine.engine import Engine
from weft.domain.policy.engine.engine_sync import CONCERNED, CONCERNED_FOLDERS, SHARED, SHARED_FOLDERS, follow
from weft.domain.policy.explain.dns_egress import kept_in_by
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import PolicyPart
from weft.runtime.logs import Log

log = Log("policy")


class TenantPolicy:
    """See the module. Changes are gathered by `follow`, `add_endpoint` and `dismiss`; `refresh` tells what they come to."""

    def __init__(
        self, cluster: Cluster, tenant: TenantName, *, node: NodeName, attached: Iterable[model.Endpoint]
    ) -> None:
        self._cluster = cluster
        self._node = node
        self._admitted: dict[EndpointKey, model.Endpoint] = {}
        self._knows_others = False
        self._engine = Engine()
        self.tables = PolicyMap(self._engine, tenant=tenant, node=node)
        self._tenant = tenant
        for endpoint in attached:
            self.add_endpoint(endpoint)
        for kind in CONCERNED:
            if kind is not kinds.ENDPOINT:
                self._follow_all(kind)
        for kind in SHARED:
            for value in cluster.all(kind):
                self.follow(kind.store_key(*kind.key_parts(value)))
        self._survey()

    @property
    def engine(self) -> Engine:
        """The engine, with everyone in it."""
        self._meet_the_others()
        return self._engine

    def dns_egress_denied(self, endpoint: model.Endpoint, resolvers: Collection[Address]) -> bool:
        """Whether a workload of this node may ask none of the resolvers."""
        return kept_in_by(self._engine, node=self._node, resolvers=resolvers)(endpoint)

    def _meet_the_others(self) -> None:
        """Take in workloads of other nodes, which matter to nobody until there is a policy or a question."""
        if not self._knows_others:
            self._knows_others = True
            self._follow_all(kinds.ENDPOINT)

    def _follow_all(self, kind: Kind[Any]) -> None:
        for value in self._cluster.all(kind, self._tenant):
            self.follow(kind.store_key(*kind.key_parts(value)))

    def follow(self, key: StoreKey) -> None:
        """Take in an object of the cluster as it is now."""
        folder, *parts = key.split("/")
        if folder == kinds.ENDPOINT.prefix:
            endpoint = EndpointKey(*parts)  # type: ignore[arg-type]
            if endpoint in self._admitted:
                self._relabel(endpoint)
            if not self._knows_others or self._is_ours(endpoint):
                return
        elif folder in {kinds.POLICY.prefix, kinds.KUBE_POLICY.prefix}:
            self._meet_the_others()
        try:
            self.tables.note(follow(self._engine, self._cluster, key))
        except Invalid as error:
            log.warning("object without effect on policy", key=key, reason=error.message)
        if folder == kinds.NETWORK.prefix:
            self._survey()

    def _relabel(self, key: EndpointKey) -> None:
        """Of a workload of this node the store knows the labels of the moment, and only them."""
        if (known := self._as_known(self._admitted[key])) != self._admitted[key]:
            self._admitted[key] = known
            self.tables.note(self._engine.put(known))

    def _as_known(self, endpoint: model.Endpoint) -> model.Endpoint:
        stored = self._cluster.get(kinds.ENDPOINT, *endpoint.key)
        return stored.value if stored is not None and is_same(stored.value, endpoint) else endpoint

    def _is_ours(self, key: EndpointKey) -> bool:
        """Whether an endpoint is this node's, and so none of the store's business."""
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        return key in self._admitted or (stored is not None and stored.value.host == self._node)

    def _survey(self) -> None:
        """The tenant's networks: addresses in them that nobody has been heard of are strangers, not the world."""
        subnets: list[Range] = []
        gateways: list[Address] = []
        for network in self._cluster.networks(self._tenant):
            for family in (4, 6):
                if subnet := ipam.subnet_of(network, family):
                    subnets.append(subnet.whole)
                if gateway := ipam.gateway_of(network, family):
                    gateways.append(gateway)
        self.tables.set_ground(subnets, gateways)

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        """A workload of this node is about to be wired."""
        self._admitted[endpoint.key] = known = self._as_known(endpoint)
        self.tables.note(self._engine.put(known))

    def dismiss(self, key: EndpointKey) -> None:
        """A workload of this node is being taken off."""
        self._admitted.pop(key, None)
        self.tables.note(self._engine.remove_endpoint(key))

    def refresh(self) -> Difference[PolicyPart]:
        """What the datapath is to be told since the last time."""
        return self.tables.refresh()


class Policies:
    """A topic (`weft.agent.dataplane.features`): the policy of every tenant with workloads on this node."""

    def __init__(self, cluster: Cluster, *, node: NodeName, journal: AttachmentStore) -> None:
        self._cluster = cluster
        self._node = node
        self._journal = journal
        self._policies: dict[TenantName, TenantPolicy] = {}
        self._former: dict[TenantName, Set[PolicyPart]] = {}

    @property
    def by_tenant(self) -> Mapping[TenantName, TenantPolicy]:
        return self._policies

    def replace(self) -> None:
        for tenant, policy in self._policies.items():
            self._former.setdefault(tenant, policy.tables.parts)
        self._policies.clear()

    def follow(self, key: StoreKey) -> None:
        folder, _, rest = key.partition("/")
        if folder in SHARED_FOLDERS:
            for each in self._policies.values():
                each.follow(key)
        elif folder in CONCERNED_FOLDERS and (policy := self._policies.get(TenantName(rest.partition("/")[0]))):
            policy.follow(key)

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        policy = self._policies.get(endpoint.tenant)
        if policy is None:
            return self._enter(endpoint.tenant)
        policy.add_endpoint(endpoint)
        return _as_parts(policy.refresh())

    def dismiss(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        policy = self._policies.get(endpoint.tenant)
        if policy is None:
            return NOTHING
        policy.dismiss(endpoint.key)
        return _as_parts(policy.refresh())

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        for table in (self._policies, self._former):
            for gone in table.keys() - tenants:
                del table[gone]
        return joined(self._refresh_one(tenant) for tenant in tenants)

    def everything(self, tenants: Set[TenantName]) -> Iterator[StateItem]:
        self.refresh(tenants)
        return (part for policy in self._policies.values() for part in policy.tables.parts)

    def _refresh_one(self, tenant: TenantName) -> Difference[StateItem]:
        known = self._policies.get(tenant)
        return _as_parts(known.refresh()) if known else self._enter(tenant)

    def _enter(self, tenant: TenantName) -> Difference[StateItem]:
        """Keep a tenant's policy from now on; the datapath may have a part of it from before."""
        attached = (note.endpoint for note in self._journal if note.key.tenant == tenant and note.stage in WIRED)
        policy = TenantPolicy(self._cluster, tenant, node=self._node, attached=attached)
        self._policies[tenant] = policy
        changes = policy.refresh()
        former = self._former.pop(tenant, None)
        return _as_parts(changes if former is None else diff(policy.tables.parts, former, rank=rank))


def _as_parts(changes: Difference[PolicyPart]) -> Difference[StateItem]:
    return changes  # type: ignore[return-value]  # a policy part is a part
