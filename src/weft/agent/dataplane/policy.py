"""Policy as a datapath feature: one policy engine and policy map per tenant with endpoints on this node.

Endpoints of other nodes come from the store. Those of this node come from their attachment: they are in the engine
before their port is opened and until it is removed, whatever the store says in the meantime.

A policy map that may take long is computed on a thread, so that the event loop serves health checks and the ADDs of
other tenants meanwhile. The thread owns the policy map and only reads the engine, which nobody changes until it has
ended: changes of the store wait, and so do the endpoints of the tenant. Everything else is done on the event loop.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from weft.agent.store.attachment_store import HAS_PORT, AttachmentStore
from weft.domain import kinds, model
from weft.domain.addresses import Address, Range
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff, joined, net
from weft.domain.desired.state import NOTHING, StateItem, rank
from weft.domain.dns.names import Transports
from weft.domain.errors import Invalid
from weft.domain.ids import EndpointKey, NodeName, StoreKey, TenantName
from weft.domain.ipam import ipam
from weft.domain.kinds import Kind
from weft.domain.lifecycle.changes.endpoints import is_same
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.policy.compile.limits import QUICK_SIZE, compile_bounded, size_of
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
from weft.domain.policy.model.rules import CompiledPolicy
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import PolicyItem
from weft.domain.store_keys import ObjectKey, parse_store_key
from weft.runtime.logs import Log

log = Log("policy")

# A tenant with more rules, or more changes to compute, is computed on a thread. Rules that all overlap cost their
# square: these many take about 20 ms. A thread costs an ADD about 0.2 ms.
INLINE_RULES, INLINE_CHANGES = 50, 200

_NO_CHANGE: Difference[PolicyItem] = Difference((), ())


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
        # The computation on a thread, while it runs, and the objects to read again when it has ended.
        self.computing: asyncio.Task[None] | None = None
        self._postponed: dict[StoreKey, None] = {}
        # NetworkPolicies that take long to compile: the thread does it, before the engine gets them.
        self._uncompiled: dict[StoreKey, KubePolicy] = {}
        # What is computed and not handed to the datapath yet.
        self._ready = _NO_CHANGE
        # Whose items the datapath has until it gets those of this one.
        self.former: TenantPolicy | None = None
        self.is_computed = False
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
        """The engine, with the endpoints of all nodes. Only to be read."""
        if self.computing is None:
            self._add_remote_endpoints()
        return self._engine

    def dns_egress_denied(self, endpoint: model.Endpoint, resolvers: Collection[Address]) -> Transports:
        """By which transports policy denies an endpoint of this node DNS to every resolver."""
        if self._uncompiled and not self.is_computed and endpoint.host == self._node:
            return Transports.BOTH  # fail closed until the engine has all policies
        return dns_egress_denied_by(self._engine, node=self._node, resolvers=resolvers)(endpoint)

    def _add_remote_endpoints(self) -> None:
        if not self._has_remote:
            self._has_remote = True
            self._follow_all(kinds.ENDPOINT)

    def _follow_all(self, kind: Kind[Any]) -> None:
        for key in keys_to_sync(self._cluster, kind, self._tenant):
            self.follow(key)

    def follow(self, key: StoreKey) -> None:
        """Read an object of the cluster again, now or when the thread has ended."""
        if self.computing is not None:
            self._postponed[key] = None
            return
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
        if parsed.kind is kinds.KUBE_POLICY:
            self._uncompiled.pop(key, None)
            stored = self._cluster.get(kinds.KUBE_POLICY, *parsed.parts)
            if stored is not None and size_of(stored.value.spec) > QUICK_SIZE:
                self._uncompiled[key] = stored.value
                return
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

    @property
    def is_costly(self) -> bool:
        """Whether the next computation may take long."""
        return (
            self.former is not None
            or bool(self._uncompiled)
            or self.policy_map.noted_changes > INLINE_CHANGES
            or len(self._engine.policies) > INLINE_RULES
            or sum(len(policy.rules) for policy in self._engine.policies.values()) > INLINE_RULES
        )

    @property
    def is_current(self) -> bool:
        """Whether everything that is known is computed."""
        return self.computing is None and self.is_computed and not (self.policy_map.is_stale or self._uncompiled)

    def compute(self) -> None:
        """Compute what has changed, on the event loop."""
        self._put_compiled(_compile(self._uncompiled.values()))
        self._ready = net(self._ready, self._compute())
        self.former, self.is_computed = None, True

    async def compute_on_thread(self) -> bool:
        """The same on a thread; whether the engine got something later than the cluster."""
        is_late = bool(self._uncompiled)
        try:
            if is_late:
                self._put_compiled(await asyncio.to_thread(_compile, tuple(self._uncompiled.values())))
            changes = await asyncio.to_thread(self._compute)
            # The event loop may have handed over what was ready before.
            self._ready = net(self._ready, changes)
            self.former, self.is_computed = None, True
        finally:
            self.computing = None
            postponed, self._postponed = self._postponed, {}
            for key in postponed:
                self.follow(key)
        return is_late or bool(postponed)

    def _put_compiled(self, policies: Iterable[CompiledPolicy]) -> None:
        # Nothing was added meanwhile: changes of the store wait for the end of the computation.
        self._uncompiled.clear()
        for policy in policies:
            self.policy_map.note(self._engine.put_compiled(policy))

    def _compute(self) -> Difference[PolicyItem]:
        changes = self.policy_map.refresh()
        return changes if self.former is None else diff(self.state_items, self.former.handed_over(), rank=rank)

    @property
    def state_items(self) -> Set[PolicyItem]:
        """All items, as of the last computation. Not while a thread computes."""
        return self.policy_map.state_items

    def handed_over(self) -> Set[PolicyItem]:
        """The items that the datapath has."""
        return (self.state_items - set(self._ready.put)) | set(self._ready.drop) if self._ready else self.state_items

    def take(self) -> Difference[PolicyItem]:
        """What is computed and not taken yet. The caller hands it to the datapath at once."""
        ready, self._ready = self._ready, _NO_CHANGE
        return ready

    def refresh(self) -> Difference[PolicyItem]:
        """The changes of the policy map since the last call."""
        self.compute()
        return self.take()


class Policies:
    """A `DatapathFeature`: the policy of every tenant with endpoints on this node."""

    def __init__(self, cluster: Cluster, *, node: NodeName, attachment_store: AttachmentStore) -> None:
        self._cluster = cluster
        self._node = node
        self._attachment_store = attachment_store
        self._policies: dict[TenantName, TenantPolicy] = {}
        # After a new listing: whose items the datapath still has, of a tenant whose policy is computed again.
        self._former: dict[TenantName, TenantPolicy] = {}
        # How many threads compute, and the threshold of the garbage collector without them.
        self._computations, self._full_collection_after = 0, 0
        # Held by `idle`. Without it an endpoint may start a computation.
        self._may_start = asyncio.Lock()
        # Called with a tenant whose engine changed later than the cluster.
        self.on_late_change: list[Callable[[TenantName], None]] = []

    @property
    def by_tenant(self) -> Mapping[TenantName, TenantPolicy]:
        return self._policies

    def replace(self) -> None:
        for tenant, policy in self._policies.items():
            self._former.setdefault(tenant, policy.former or policy)
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

    async def attach(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """As `add_endpoint`, when the policy of the tenant is computed with the endpoint."""
        return await self._change(endpoint.tenant, lambda policy: policy.add_endpoint(endpoint))

    async def detach(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """As `remove_endpoint`, when the policy of the tenant is computed without the endpoint."""
        if endpoint.tenant not in self._policies:
            return NOTHING
        return await self._change(endpoint.tenant, lambda policy: policy.remove_endpoint(endpoint.key))

    async def _change(self, tenant: TenantName, change: Callable[[TenantPolicy], None]) -> Difference[StateItem]:
        while True:
            async with self._may_start:
                pass  # no await from here to the start of the computation
            policy = self._policies.get(tenant) or self._new_tenant(tenant)
            if policy.computing is not None:
                await asyncio.wait([policy.computing])
                continue
            change(policy)
            await self._compute_one(tenant, policy)
            # A new listing may have replaced the policy meanwhile: its successor needs the change as well.
            if self._policies.get(tenant) is policy:
                return _as_state_items(policy.take())

    async def compute(self, tenants: Set[TenantName]) -> None:
        """Return when what is known of the tenants at the call is computed. ADDs of other tenants go on meanwhile."""
        for tenant in tenants:
            await self._compute_one(tenant, self._policies.get(tenant) or self._new_tenant(tenant))

    @asynccontextmanager
    async def idle(self) -> AsyncIterator[None]:
        """In the block no thread computes, until its first await."""
        async with self._may_start:
            while running := [policy.computing for policy in self._all() if policy.computing is not None]:
                await asyncio.wait(running)
            yield

    def is_current(self, tenants: Set[TenantName]) -> bool:
        """Whether everything known of the tenants is computed."""
        return all((policy := self._policies.get(tenant)) and policy.is_current for tenant in tenants)

    def _all(self) -> Iterator[TenantPolicy]:
        for policy in (*self._policies.values(), *self._former.values()):
            yield policy
            if policy.former is not None:
                yield policy.former

    @contextmanager
    def _no_full_collection(self) -> Iterator[None]:
        """Put the collection of the oldest objects off while threads compute.

        It stops all threads for about 100 ms, and the many new objects would bring it about again and again.
        """
        young, middle, old = gc.get_threshold()
        if not self._computations:
            self._full_collection_after = old
            gc.set_threshold(young, middle, 1_000_000)
        self._computations += 1
        try:
            yield
        finally:
            self._computations -= 1
            if not self._computations:
                gc.set_threshold(young, middle, self._full_collection_after)

    async def _compute_one(self, tenant: TenantName, policy: TenantPolicy) -> None:
        # A computation that runs began earlier: what is known now may have come after its start.
        for earlier in (policy, policy.former):
            if earlier is not None and earlier.computing is not None:
                await asyncio.wait([earlier.computing])
        if policy.computing is None and not policy.is_current:
            if not policy.is_costly:
                policy.compute()
                return
            policy.computing = asyncio.create_task(self._compute_on_thread(tenant, policy), name=f"policy {tenant}")
        if (task := policy.computing) is not None:
            # A caller that is cancelled leaves the thread alone: it owns the policy map until it has ended.
            await asyncio.wait([task])
            task.result()

    async def _compute_on_thread(self, tenant: TenantName, policy: TenantPolicy) -> None:
        with self._no_full_collection():
            is_late = await policy.compute_on_thread()
        if is_late:
            for notify in self.on_late_change:
                notify(tenant)

    def refresh(self, tenants: Set[TenantName]) -> Difference[StateItem]:
        for table in (self._policies, self._former):
            for gone in table.keys() - tenants:
                del table[gone]
        return joined(self._refresh_one(tenant) for tenant in tenants)

    def everything(self, tenants: Set[TenantName]) -> Iterator[StateItem]:
        self.refresh(tenants)
        for policy in self._policies.values():
            if not policy.is_computed:
                policy.refresh()  # whatever it takes: without its items the tenant would be open
        return (item for policy in self._policies.values() for item in policy.state_items)

    def _refresh_one(self, tenant: TenantName) -> Difference[StateItem]:
        known = self._policies.get(tenant)
        if known is None:
            former = self._former.get(tenant)
            return self._add_tenant(tenant) if former is None or former.computing is None else NOTHING
        # What takes long is left to `compute`; the datapath keeps what it has.
        if not known.is_current and known.computing is None and not known.is_costly:
            known.compute()
        return _as_state_items(known.take())

    def _add_tenant(self, tenant: TenantName) -> Difference[StateItem]:
        return _as_state_items(self._new_tenant(tenant).refresh())

    def _new_tenant(self, tenant: TenantName) -> TenantPolicy:
        """Compute a tenant's policy from now on. The datapath may have some of its items from before."""
        attached = (
            attachment.endpoint
            for attachment in self._attachment_store
            if attachment.key.tenant == tenant and attachment.stage in HAS_PORT
        )
        policy = TenantPolicy(self._cluster, tenant, node=self._node, attached=attached)
        policy.former = self._former.pop(tenant, None)
        self._policies[tenant] = policy
        return policy


def _compile(policies: Iterable[KubePolicy]) -> list[CompiledPolicy]:
    return [compile_bounded(each.policy) for each in policies]


def _as_state_items(changes: Difference[PolicyItem]) -> Difference[StateItem]:
    return changes  # type: ignore[return-value]  # a policy item is a state item
