"""Kubernetes sync: the leader writes the desired state, as the informers report it, into the store.

- A full list of a kind is diffed against the store; a watch event changes one object.
- A Service and its slices belong to the tenant that their Namespace's label names. They wait for the Namespace, and
  move when its label changes. With a label that is no name of a tenant they are in none.
- Nothing is deleted before a full list of its kind shows that it is gone.
- Changes that arrive while a commit is running go into the next one.
- An object that the store rejects does not keep others out.

`KubePurge` deletes all of it, for a cluster that has left mode kubernetes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import TENANT_LABEL, tenant_of_namespace
from weft.domain.errors import Conflict, Invalid, OpensTraffic, WeftError
from weft.domain.ids import TenantName
from weft.domain.kinds import Kind
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.store_keys import ObjectKey, parse_store_key
from weft.domain.store_types import LARGEST_VALUE, Delete, Put, Write
from weft.domain.transaction import ReadSet, Transaction, put
from weft.domain.validation import check
from weft.master.api.objects import API
from weft.master.control.control import ControlPlane
from weft.master.control.policy_status import PolicyStatus, WaitForSync
from weft.ports.orchestrator import ClusterInformers
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.http import json_response
from weft.runtime.logs import Log
from weft.runtime.routes import Query, Route, is_set
from weft.runtime.tasks import background

log = Log("kubernetes")

# Writes in one commit: etcd takes 128 operations.
MAX_WRITES = 100
# Bytes in one commit, unless a single document has more: etcd takes 1.5 MB in a request.
MAX_BYTES = 500_000

# Period of a full diff without any event: a restored backup may have brought back deleted objects.
RESYNC_S = 60.0

# NetworkPolicies that the answer of a dry run names.
MAX_POLICIES = 1000

# Kinds whose documents belong to the tenant of their Namespace.
TENANT_SCOPED: tuple[Kind[Any], ...] = (kinds.KUBE_SERVICE, kinds.KUBE_SLICE)

# A document's key without the tenant: it stays the same when the document moves to another tenant.
_Identity = tuple[str, ...]
Batch = Sequence[Put | Delete]


class KubeDesired:
    """The desired documents, fed as a `ResourceHandler`, and the writes that bring the store in line with them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # A kind is present from its first full list on.
        self._desired: dict[Kind[Any], dict[_Identity, model.Value]] = {}
        # Kinds to diff completely.
        self._dirty_kinds: set[Kind[Any]] = set()
        # Single documents to compare.
        self._dirty: set[tuple[Kind[Any], _Identity]] = set()
        self.changed = asyncio.Event()

    def replace(self, kind: Kind[Any], documents: Sequence[model.Value]) -> None:
        self._desired[kind] = {_identity(kind, document): document for document in documents}
        if kind is kinds.KUBE_NAMESPACE:
            for namespace in documents:
                _report_label(namespace)
        self._mark_kinds_dirty(kind)

    def put(self, kind: Kind[Any], document: model.Value) -> None:
        identity = _identity(kind, document)
        before = self._desired[kind].get(identity)
        if before != document:
            self._desired[kind][identity] = document
            self._mark_document_dirty(kind, identity)
            if kind is kinds.KUBE_NAMESPACE and (before is None or _tenant(before) != _tenant(document)):
                self._mark_kinds_dirty(*TENANT_SCOPED)
                _report_label(document)

    def remove(self, kind: Kind[Any], document: model.Value) -> None:
        identity = _identity(kind, document)
        if self._desired[kind].pop(identity, None) is not None:
            self._mark_document_dirty(kind, identity)

    def _mark_kinds_dirty(self, *dirty: Kind[Any]) -> None:
        self._dirty_kinds.update(dirty)
        if kinds.KUBE_NAMESPACE in dirty:
            self._dirty_kinds.update(TENANT_SCOPED)
        self.changed.set()

    def _mark_document_dirty(self, kind: Kind[Any], identity: _Identity) -> None:
        self._dirty.add((kind, identity))
        self.changed.set()

    def mark_dirty(self) -> None:
        """Diff everything next time: the store may not have what was written."""
        self._mark_kinds_dirty(*self._desired)

    def take_writes(self) -> Iterator[Write]:
        """The writes for what is dirty, against the cluster in memory. What is taken is no longer dirty."""
        dirty_kinds, self._dirty_kinds = self._dirty_kinds & self._desired.keys(), set()
        dirty, self._dirty = self._dirty, set()
        # Before the first list of Namespaces no tenant is known. Services and slices stay dirty until then.
        if kinds.KUBE_NAMESPACE not in self._desired:
            self._dirty_kinds, dirty_kinds = dirty_kinds & set(TENANT_SCOPED), dirty_kinds - set(TENANT_SCOPED)
        for kind in dirty_kinds:
            yield from self._diff_kind(kind)
        for kind, identity in dirty:
            if kind not in dirty_kinds and not (kind in TENANT_SCOPED and kinds.KUBE_NAMESPACE not in self._desired):
                yield from self._diff_document(kind, identity)

    def _diff_kind(self, kind: Kind[Any]) -> Iterator[Write]:
        stored = {kind.store_key(*kind.key_parts(document)): document for document in self._cluster.all(kind)}
        faults = ((key, self._cluster.faults[key]) for key in self._cluster.unreadable_objects(kind))
        # A document of a newer Weft is left alone: only that Weft knows what it says.
        garbage = {key: fault for key, fault in faults if not fault.newer}
        for identity in self._desired[kind]:
            document = self._desired_document(kind, identity)
            if document is None:
                continue
            key = kind.store_key(*kind.key_parts(document))
            # Garbage over a document is replaced, also while its last good value is the desired one.
            if stored.pop(key, None) != document or garbage.pop(key, None):
                yield Put(key, codec.encode(document))
        for key, document in stored.items():
            if not self._awaits_namespace(kind, document):
                yield Delete(key)
        for key in garbage.keys() - stored.keys():
            yield Delete(key)

    def _diff_document(self, kind: Kind[Any], identity: _Identity) -> Iterator[Write]:
        """Writes for one document. A tenant-scoped one is looked for in every tenant, as it may have moved."""
        document = self._desired_document(kind, identity)
        leads: set[tuple[str, ...]] = {()}
        if kind in TENANT_SCOPED:
            leads = {(tenant.name,) for tenant in self._cluster.all(kinds.TENANT)}
            # The label may name a tenant that does not exist (yet).
            leads |= {(document.tenant,)} if document is not None else set()
        for lead in leads:
            stored = self._cluster.get(kind, *lead, *identity)
            is_desired = document is not None and (kind not in TENANT_SCOPED or lead == (document.tenant,))
            key = kind.store_key(*lead, *identity)
            if is_desired and (stored is None or stored.value != document):
                yield Put(key, codec.encode(document))
            elif not is_desired and stored is not None and not self._awaits_namespace(kind, stored.value):
                yield Delete(key)

    def _desired_document(self, kind: Kind[Any], identity: _Identity) -> Any:
        """The document with its tenant; None when it is not desired, has no tenant (yet), or is invalid."""
        document = self._desired[kind].get(identity)
        if document is None:
            return None
        if isinstance(document, KubeService | KubeSlice):
            namespace = self._desired[kinds.KUBE_NAMESPACE].get((document.namespace,))
            if namespace is None:
                return None
            tenant = _tenant(namespace)
            if tenant is None:
                return None
            document = msgspec.structs.replace(document, tenant=tenant)
        try:
            return check(document)
        except Invalid as error:
            log.error("object rejected", kind=kind.name, key="/".join(identity), reason=error.message)
            return None

    def _awaits_namespace(self, kind: Kind[Any], document: Any) -> bool:
        """Whether a stored document is desired, but its Namespace is not known yet: it must not be deleted then."""
        return (
            kind in TENANT_SCOPED
            and _identity(kind, document) in self._desired[kind]
            and (document.namespace,) not in self._desired[kinds.KUBE_NAMESPACE]
        )


async def run_kube_sync(control: ControlPlane, informers: ClusterInformers, *, wait_for_sync: WaitForSync) -> None:
    """Keep the store in sync with Kubernetes while we lead. Failures are retried."""
    desired = KubeDesired(control.cluster)
    policy_status = PolicyStatus(control.cluster, informers, wait_for_sync=wait_for_sync)
    async with (
        informers,
        background(informers.run(desired), name="informers"),
        background(policy_status.run(), name="policy status"),
    ):
        backoff = Backoff()
        while True:
            if not await wait_event(desired.changed, within=RESYNC_S):
                desired.mark_dirty()
            # Cleared before the diff, so that a change during the commit is not missed.
            desired.changed.clear()
            try:
                for batch in batches(desired.take_writes()):
                    await write_batch(control, batch, written=policy_status.written)
                backoff.reset()
            except WeftError as error:
                log.warning("Kubernetes sync failed, retrying", reason=error.message)
                # The rest of the taken writes is lost, and a commit may have happened without our knowing.
                desired.mark_dirty()
                await backoff.pause()


async def write_batch(control: ControlPlane, batch: Batch, *, written: Callable[[Batch], None]) -> None:
    """Commit a batch and call `written` with it. If the store rejects it, commit its writes one by one.

    A single write that is rejected is logged. A policy is then written without its rules, so that it still isolates its
    pods, and its Event says so.
    """
    try:
        check_value_sizes(batch)
        await control.carry_out(partial(plan_batch, batch))
    except Invalid as error:
        retries: list[list[Put | Delete]] = [[write] for write in batch]
        if len(batch) == 1:
            log.error("object rejected", key=batch[0].key, reason=error.message)
            reduced = fail_closed(batch[0], control.cluster, fault=error.message)
            retries = [] if reduced is None else [[reduced]]
        for retry in retries:
            await write_batch(control, retry, written=written)
    else:
        written(batch)


def check_value_sizes(batch: Batch) -> None:
    """`Invalid` when a document is too large for a store."""
    for write in batch:
        if isinstance(write, Put) and len(write.value) > LARGEST_VALUE:
            raise Invalid(f"object is {len(write.value)} bytes, the limit is {LARGEST_VALUE}: split it")


def fail_closed(rejected: Put | Delete, cluster: Cluster, *, fault: str) -> Put | None:
    """The write of a rejected policy without its rules; None for other kinds, or when that is stored already."""
    if not isinstance(rejected, Put) or not rejected.key.startswith(f"{kinds.KUBE_POLICY.prefix}/"):
        return None
    policy = codec.decode(KubePolicy, rejected.value)
    reduced = policy.fail_closed(fault)
    stored = cluster.get(kinds.KUBE_POLICY, *kinds.KUBE_POLICY.key_parts(reduced))
    # Without this check a policy that has no rules to remove would be retried forever.
    had_rules = policy.spec.ingress or policy.spec.egress
    return put(kinds.KUBE_POLICY, reduced) if had_rules and (stored is None or stored.value != reduced) else None


def plan_batch(batch: Batch, reading: ReadSet) -> Transaction:
    """The batch as one commit. Each key is compared, so that a concurrent restore makes it stale."""
    for write in batch:
        parsed = parse_store_key(write.key)
        assert isinstance(parsed, ObjectKey)
        reading.get(parsed.kind, *parsed.parts)
    return reading.plan(list(batch))


def batches(writes: Iterator[Write]) -> Iterator[list[Put | Delete]]:
    """The writes in batches that every store accepts as one commit."""
    batch: list[Put | Delete] = []
    size = 0
    for write in writes:
        assert isinstance(write, Put | Delete)
        length = len(write.value) if isinstance(write, Put) else 0
        if batch and (len(batch) == MAX_WRITES or size + length > MAX_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(write)
        size += length
    if batch:
        yield batch


def _identity(kind: Kind[Any], document: model.Value) -> _Identity:
    parts = kind.key_parts(document)
    return parts[1:] if kind in TENANT_SCOPED else parts


def _tenant(namespace: Any) -> TenantName | None:
    """The tenant of a Namespace's label; None for an invalid one. The ADD of its pods reports that, too."""
    try:
        return tenant_of_namespace(namespace.labels)
    except Invalid:
        return None


def _report_label(namespace: Any) -> None:
    """Log that the Services of a Namespace belong to no tenant. In the default one its pods could reach them."""
    try:
        tenant_of_namespace(namespace.labels)
    except Invalid as error:
        log.warning(
            "namespace without a valid tenant: its services are not served",
            namespace=namespace.name,
            label=TENANT_LABEL,
            reason=error.message,
        )


class PurgePlan(msgspec.Struct, kw_only=True, frozen=True, rename="camel"):
    """What a purge would delete: numbers by kind, and the NetworkPolicies that it would lift, as NAMESPACE/NAME."""

    counts: dict[str, int]
    policies: list[str]
    network_policies: int
    dry_run: bool = True


class KubePurge:
    """REST route that deletes all Kubernetes objects from the store, on request only.

    Nothing is purged automatically: a netmaster started in the wrong mode must not lift the isolation that
    NetworkPolicies demand.
    """

    def __init__(self, control: ControlPlane, *, is_syncing: bool) -> None:
        """`is_syncing`: this netmaster runs in mode kubernetes and would write everything again."""
        self._control = control
        self._is_syncing = is_syncing

    def routes(self) -> tuple[Route, ...]:
        flag: dict[str, Any] = {"type": "boolean"}
        force = Query(name="force", about="also lift NetworkPolicies; refused with 409 otherwise", schema=flag)
        dry_run = Query(name="dry-run", about="write nothing; answer what would be deleted", schema=flag)
        return (
            Route(method="DELETE", path=f"{API}/kubernetes", handler=self.purge, answer=dict[str, int],
                  alternative=PurgePlan, query=(force, dry_run),
                  about="Delete all Kubernetes objects from the store, after leaving mode kubernetes"),
        )  # fmt: skip

    async def purge(self, request: web.Request) -> web.Response:
        if self._is_syncing:
            raise Conflict("this netmaster syncs with Kubernetes and would write it again: start it in another --mode")
        cluster = self._control.cluster
        policies = sorted(f"{policy.namespace}/{policy.name}" for policy in cluster.all(kinds.KUBE_POLICY))
        if is_set(request.query, "dry-run"):
            counts = {kind.name: len(list(cluster.all(kind))) for kind in kinds.KUBERNETES}
            plan = PurgePlan(counts=counts, policies=policies[:MAX_POLICIES], network_policies=len(policies))
            return json_response(plan)
        if policies and not is_set(request.query, "force"):
            what = "1 NetworkPolicy" if len(policies) == 1 else f"{len(policies)} NetworkPolicies"
            raise OpensTraffic(
                f"this lifts {what}, such as {policies[0]}: the pods that they isolate would accept all traffic. "
                "Nothing was deleted: add force, netctl purge-kubernetes --force, if you want that",
                details={"networkPolicies": len(policies)},
            )
        count = 0
        for batch in batches(_deletes(cluster)):
            await self._control.carry_out(partial(plan_batch, batch))
            count += len(batch)
        log.info("Kubernetes objects purged", documents=count)
        return json_response({"purged": count})


def warn_of_leftovers(cluster: Cluster) -> None:
    """Log a warning when the store has Kubernetes objects and this netmaster does not sync them."""
    if count := sum(1 for _ in _deletes(cluster)):
        log.warning(
            "Kubernetes objects are still enforced but no longer synced: run netctl purge-kubernetes to delete them",
            documents=count,
        )


def _deletes(cluster: Cluster) -> Iterator[Delete]:
    for kind in kinds.KUBERNETES:
        # A copy: the table changes while batches are committed.
        for value in list(cluster.all(kind)):
            yield Delete(kind.store_key(*kind.key_parts(value)))
