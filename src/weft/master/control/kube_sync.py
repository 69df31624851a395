"""What the orchestrator declares, written into the store by the leader: listings as differences, news as it comes.

A service and its slices belong to the tenant that their namespace names, so they wait for it; when the namespace names
another, they move. Nothing is deleted before a whole listing says that it is gone. What is news while a commit is under
way goes together in the next. What the store refuses keeps nothing else out of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from weft.domain import codec, kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import TENANT_LABEL
from weft.domain.errors import Invalid, WeftError
from weft.domain.ids import DEFAULT_TENANT, TenantName, check_name
from weft.domain.kinds import Kind
from weft.domain.loadbalancer.kube_objects import KubeService, KubeSlice
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.store_types import LARGEST_VALUE, Delete, Put, Write
from weft.domain.transaction import ReadSet, Transaction, put
from weft.domain.validation import check
from weft.master.control.control import ControlPlane
from weft.master.control.policy_status import PolicyStatus, Settle
from weft.ports.orchestrator import ClusterInformers
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.logs import Log
from weft.runtime.tasks import background

log = Log("kubernetes")

# In one commit: etcd takes 128 operations.
MOST_WRITES = 100
# In one commit, unless a single document has more.
MOST_BYTES = 500_000

# How often everything is compared though nothing is new: a restore may have brought back what was.
COMPARE_EVERY_S = 60.0

# Kinds whose documents belong to the tenant of their namespace.
HOMED: tuple[Kind[Any], ...] = (kinds.KUBE_SERVICE, kinds.KUBE_SLICE)

_Identity = tuple[str, ...]
Batch = Sequence[Put | Delete]


class KubeDesired:
    """The documents that should be there, as a `ResourceHandler` is told of them, and how they differ from those that are."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._wanted: dict[Kind[Any], dict[_Identity, model.Value]] = {}
        # Kinds of which everything is to be compared.
        self._whole: set[Kind[Any]] = set()
        self._touched: set[tuple[Kind[Any], _Identity]] = set()
        self.news = asyncio.Event()

    def replace(self, kind: Kind[Any], documents: Sequence[model.Value]) -> None:
        self._wanted[kind] = {_identity(kind, each): each for each in documents}
        self._compare(kind)

    def put(self, kind: Kind[Any], document: model.Value) -> None:
        identity = _identity(kind, document)
        before = self._wanted[kind].get(identity)
        if before != document:
            self._wanted[kind][identity] = document
            self._touch(kind, identity)
            if kind is kinds.KUBE_NAMESPACE and (before is None or _tenant(before) != _tenant(document)):
                self._compare(*HOMED)

    def remove(self, kind: Kind[Any], document: model.Value) -> None:
        identity = _identity(kind, document)
        if self._wanted[kind].pop(identity, None) is not None:
            self._touch(kind, identity)

    def _compare(self, *compared: Kind[Any]) -> None:
        self._whole.update(compared)
        if kinds.KUBE_NAMESPACE in compared:
            self._whole.update(HOMED)
        self.news.set()

    def _touch(self, kind: Kind[Any], identity: _Identity) -> None:
        self._touched.add((kind, identity))
        self.news.set()

    def mark_dirty(self) -> None:
        """The store may not be as it was told: everything is to be compared."""
        self._compare(*self._wanted)

    def take(self) -> Iterator[Write]:
        """What is to be written since the last time, as the cluster in memory has it."""
        whole, self._whole = self._whole & self._wanted.keys(), set()
        touched, self._touched = self._touched, set()
        if kinds.KUBE_NAMESPACE not in self._wanted:  # whose anything is nobody knows yet: they are compared then
            self._whole, whole = whole & set(HOMED), whole - set(HOMED)
        for kind in whole:
            yield from self._differences(kind)
        for kind, identity in touched:
            if kind not in whole and not (kind in HOMED and kinds.KUBE_NAMESPACE not in self._wanted):
                yield from self._difference(kind, identity)

    def _differences(self, kind: Kind[Any]) -> Iterator[Write]:
        stored = {kind.store_key(*kind.key_parts(each)): each for each in self._cluster.all(kind)}
        for identity in self._wanted[kind]:
            document = self._homed(kind, identity)
            if document is None:
                continue
            key = kind.store_key(*kind.key_parts(document))
            if stored.pop(key, None) != document:
                yield Put(key, codec.encode(document))
        for key, document in stored.items():
            if not self._waits(kind, document):
                yield Delete(key)

    def _difference(self, kind: Kind[Any], identity: _Identity) -> Iterator[Write]:
        """One object; services and slices are looked for in the tenant that they are in, and in the one of before."""
        document = self._homed(kind, identity)
        leads: set[tuple[str, ...]] = {()}
        if kind in HOMED:
            leads = {(each.name,) for each in self._cluster.all(kinds.TENANT)}
            leads |= {(document.tenant,)} if document is not None else set()
        for lead in leads:
            stored = self._cluster.get(kind, *lead, *identity)
            is_there = document is not None and (kind not in HOMED or lead == (document.tenant,))
            key = kind.store_key(*lead, *identity)
            if is_there and (stored is None or stored.value != document):
                yield Put(key, codec.encode(document))
            elif not is_there and stored is not None and not self._waits(kind, stored.value):
                yield Delete(key)

    def _homed(self, kind: Kind[Any], identity: _Identity) -> Any:
        """The document as it is to be kept; None when there is none, or it must wait, or cannot be kept."""
        document = self._wanted[kind].get(identity)
        if document is None:
            return None
        if isinstance(document, KubeService | KubeSlice):
            namespace = self._wanted[kinds.KUBE_NAMESPACE].get((document.namespace,))
            if namespace is None:
                return None
            document = msgspec.structs.replace(document, tenant=_tenant(namespace))
        try:
            return check(document)
        except Invalid as error:
            log.error("declaration not kept", kind=kind.name, key="/".join(identity), reason=error.message)
            return None

    def _waits(self, kind: Kind[Any], document: Any) -> bool:
        """Whether a stored document is still declared, in a namespace that is not known yet."""
        return (
            kind in HOMED
            and _identity(kind, document) in self._wanted[kind]
            and (document.namespace,) not in self._wanted[kinds.KUBE_NAMESPACE]
        )


async def keep_declared(control: ControlPlane, declarations: ClusterInformers, *, settle: Settle) -> None:
    """Keep the store as the orchestrator declares, for as long as we lead. What fails is tried again."""
    declared = KubeDesired(control.cluster)
    in_force = PolicyStatus(control.cluster, declarations, settle=settle)
    async with (
        declarations,
        background(declarations.run(declared), name="declarations"),
        background(in_force.run(), name="in force"),
    ):
        backoff = Backoff()
        while True:
            if not await wait_event(declared.news, within=COMPARE_EVERY_S):
                declared.mark_dirty()
            declared.news.clear()
            try:
                for batch in batches(declared.take()):
                    await keep(control, batch, written=in_force.written)
                backoff.reset()
            except WeftError as error:
                log.warning("declarations postponed", reason=error.message)
                declared.mark_dirty()
                await backoff.pause()


async def keep(control: ControlPlane, batch: Batch, *, written: Callable[[Batch], None]) -> None:
    """Commit a batch, and tell what is in the store then. When it is refused its members are tried singly.

    What is refused by itself is told in the log. A policy is kept without its rules then, so that whom it protects
    stays protected, and who declared it hears of it.
    """
    try:
        check_sizes(batch)
        await control.carry_out(partial(plan_writes, batch))
    except Invalid as error:
        members = [[each] for each in batch]
        if len(batch) == 1:
            log.error("declaration not kept", key=batch[0].key, reason=error.message)
            reduced = without_rules(batch[0], control.cluster, fault=error.message)
            members = [] if reduced is None else [[reduced]]
        for member in members:
            await keep(control, member, written=written)
    else:
        written(batch)


def check_sizes(batch: Batch) -> None:
    """`Invalid` when a document is larger than what any store takes."""
    for write in batch:
        if isinstance(write, Put) and len(write.value) > LARGEST_VALUE:
            raise Invalid(
                f"it takes {len(write.value)} bytes, and a store takes {LARGEST_VALUE}: divide it into several"
            )


def without_rules(refused: Put | Delete, cluster: Cluster, *, fault: str) -> Put | None:
    """What to write in place of a write that is refused; None where there is nothing, or it is so already."""
    if not isinstance(refused, Put) or not refused.key.startswith(f"{kinds.KUBE_POLICY.prefix}/"):
        return None
    policy = codec.decode(KubePolicy, refused.value)
    reduced = policy.without_rules(fault)
    stored = cluster.get(kinds.KUBE_POLICY, *kinds.KUBE_POLICY.key_parts(reduced))
    had_rules = policy.spec.ingress or policy.spec.egress
    return put(kinds.KUBE_POLICY, reduced) if had_rules and (stored is None or stored.value != reduced) else None


def plan_writes(batch: Batch, reading: ReadSet) -> Transaction:
    """One commit. Each key is compared: nobody else writes these."""
    for write in batch:
        folder, *parts = write.key.split("/")
        reading.get(kinds.BY_PREFIX[folder], *parts)
    return reading.plan(list(batch))


def batches(writes: Iterator[Write]) -> Iterator[list[Put | Delete]]:
    """The writes in commits that any store takes."""
    batch: list[Put | Delete] = []
    size = 0
    for write in writes:
        assert isinstance(write, Put | Delete)
        length = len(write.value) if isinstance(write, Put) else 0
        if batch and (len(batch) == MOST_WRITES or size + length > MOST_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(write)
        size += length
    if batch:
        yield batch


def _identity(kind: Kind[Any], document: model.Value) -> _Identity:
    """Its key, less the tenant."""
    parts = kind.key_parts(document)
    return parts[1:] if kind in HOMED else parts


def _tenant(namespace: Any) -> TenantName:
    """The tenant that a namespace names; one that cannot be a name is none, and is told of by the pods that need it."""
    text = namespace.labels.get(TENANT_LABEL, "")
    try:
        return TenantName(check_name(text, field=TENANT_LABEL)) if text else DEFAULT_TENANT
    except Invalid:
        return DEFAULT_TENANT
