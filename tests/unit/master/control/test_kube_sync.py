"""The store converges to the Kubernetes objects, whatever it had before and in whatever order they arrive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_cluster import FakeCluster

from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.placement import TENANT_LABEL
from weft.domain.errors import Invalid, Unavailable
from weft.domain.ids import DEFAULT_TENANT, StoreKey, TenantName
from weft.domain.kinds import Kind
from weft.domain.loadbalancer.kube_objects import EndpointSlice, KubeService, KubeSlice, ServiceObject, ServiceSpec
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.domain.policy.model.netpol import EgressRule, IpBlock, PolicyPeer, PolicySpec
from weft.domain.selectors import LabelSelector
from weft.domain.store_types import LARGEST_VALUE, NEVER, Compare, Delete, Put, Revision, RevisionEquals, Write
from weft.domain.transaction import put
from weft.master.control.control import ControlPlane
from weft.master.control.kube_sync import MAX_BYTES, MAX_WRITES, KubeDesired, batches, plan_batch, write_batch
from weft.master.metrics import Metrics
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

KINDS: tuple[Kind[Any], ...] = (kinds.KUBE_NAMESPACE, kinds.KUBE_POLICY, kinds.KUBE_SERVICE, kinds.KUBE_SLICE)


def namespace(name: str, tenant: str = "") -> KubeNamespace:
    return KubeNamespace(name=name, labels={TENANT_LABEL: tenant} if tenant else {})


def policy(space: str, name: str) -> KubePolicy:
    return KubePolicy(namespace=space, name=name)


def service(space: str, name: str = "web", *, tenant: str = "default", address: str = "10.96.0.1") -> KubeService:
    spec = ServiceSpec(cluster_ips=(address,))
    return KubeService(tenant=TenantName(tenant), namespace=space, name=name, service=ServiceObject(spec=spec))


def slice_of(space: str, name: str = "web", *, tenant: str = "default") -> KubeSlice:
    value = EndpointSlice(address_type="IPv4")
    return KubeSlice(tenant=TenantName(tenant), namespace=space, service_name=name, name=f"{name}-1", slice=value)


class Scene:
    """A cluster, and its desired Kubernetes objects. `sync` commits as a leader does."""

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.world.put(model.Tenant(name=TenantName("blue")))
        self.desired = KubeDesired(self.world.cluster)

    def sync(self) -> int:
        """Returns the number of writes."""
        count = 0
        for batch in batches(self.desired.take_writes()):
            self.world.carry_out(plan_batch(batch, self.world.reading()))
            count += len(batch)
        return count

    def stored(self) -> list[model.Value]:
        return [each for kind in KINDS for each in self.world.cluster.all(kind)]


def test_services_belong_to_the_tenant_of_their_namespace() -> None:
    scene = Scene()
    scene.desired.replace(kinds.KUBE_SERVICE, [service("ns"), service("other")])
    scene.desired.replace(kinds.KUBE_SLICE, [slice_of("ns")])
    assert scene.sync() == 0  # their tenant is not known yet
    scene.desired.replace(kinds.KUBE_NAMESPACE, [namespace("ns", "blue"), namespace("other")])
    scene.sync()
    assert scene.stored()[2:] == [service("ns", tenant="blue"), service("other"), slice_of("ns", tenant="blue")]
    scene.desired.put(kinds.KUBE_NAMESPACE, namespace("ns"))
    scene.sync()
    assert scene.stored()[2:] == [service("ns"), service("other"), slice_of("ns")]


@pytest.mark.parametrize("label", ["no_tenant!", "", "x" * 300])
def test_services_of_a_namespace_with_an_invalid_tenant_label_are_served_nowhere(
    label: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They were put into the default tenant, whose pods could then reach them. Its pods do not start, either."""
    scene = Scene()
    for kind in KINDS:
        scene.desired.replace(kind, [])
    bad = KubeNamespace(name="ns", labels={TENANT_LABEL: label})
    scene.desired.put(kinds.KUBE_NAMESPACE, namespace("ns", "blue"))
    scene.desired.put(kinds.KUBE_NAMESPACE, namespace("other"))
    for space in ("ns", "other"):
        scene.desired.put(kinds.KUBE_SERVICE, service(space))
    scene.desired.put(kinds.KUBE_SLICE, slice_of("ns"))
    scene.sync()
    scene.desired.put(kinds.KUBE_NAMESPACE, bad)
    scene.sync()
    assert scene.stored()[2:] == [service("other")]
    scene.desired.put(kinds.KUBE_SERVICE, service("ns", address="10.96.0.2"))
    assert scene.sync() == 0
    assert any(getattr(record, "weft_fields", {}).get("namespace") == "ns" for record in caplog.records)
    assert b"weft_kube_namespaces_without_tenant 1.0" in Metrics().expose(scene.world.cluster)
    scene.desired.put(kinds.KUBE_NAMESPACE, namespace("ns"))
    scene.sync()
    assert len(scene.stored()[2:]) == 3
    assert b"weft_kube_namespaces_without_tenant 0.0" in Metrics().expose(scene.world.cluster)


def test_a_service_that_arrives_before_its_namespace_waits_for_it() -> None:
    scene = Scene()
    for kind in KINDS:
        scene.desired.replace(kind, [])
    scene.desired.put(kinds.KUBE_SERVICE, service("new"))
    assert scene.sync() == 0
    scene.desired.put(kinds.KUBE_NAMESPACE, namespace("new", "blue"))
    scene.sync()
    assert scene.stored()[1:] == [service("new", tenant="blue")]


def test_nothing_is_deleted_before_a_full_list() -> None:
    scene = Scene()
    scene.world.carry_out(scene.world.reading().plan([put(kinds.KUBE_POLICY, policy("ns", "old"))]))
    scene.desired.replace(kinds.KUBE_NAMESPACE, [])
    assert scene.sync() == 0
    scene.desired.replace(kinds.KUBE_POLICY, [policy("ns", "new")])
    scene.sync()
    assert scene.stored() == [policy("ns", "new")]


def test_unchanged_objects_are_not_written_again() -> None:
    scene = Scene()
    for _ in range(2):
        scene.desired.replace(kinds.KUBE_NAMESPACE, [namespace("ns")])
        scene.desired.replace(kinds.KUBE_SERVICE, [service("ns")])
        count = scene.sync()
    assert count == 0
    scene.desired.put(kinds.KUBE_SERVICE, service("ns"))
    assert scene.sync() == 0


def test_an_invalid_object_affects_no_other() -> None:
    scene = Scene()
    scene.desired.replace(kinds.KUBE_POLICY, [policy("ns", "a/b"), policy("ns", "good")])
    scene.sync()
    assert scene.stored() == [policy("ns", "good")]


def test_batches_respect_the_limits_of_every_store() -> None:
    many = [put(kinds.KUBE_POLICY, policy("ns", f"p{number}")) for number in range(MAX_WRITES * 2 + 1)]
    assert [len(batch) for batch in batches(iter(many))] == [MAX_WRITES, MAX_WRITES, 1]
    large = [Put(each.key, b"x" * (MAX_BYTES // 2)) for each in many[:4]]
    assert [len(batch) for batch in batches(iter([*large, Delete(many[4].key)]))] == [2, 3]
    assert not list(batches(iter([])))


class PickyStore(MemoryStore):
    """Rejects documents that contain `rejected`, and is unavailable after so many commits."""

    rejected = b"no-such-document"
    away_after = 1_000_000

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if any(isinstance(each, Put) and self.rejected in each.value for each in writes):
            raise Invalid("request is too large")
        self.away_after -= 1
        if self.away_after < 0:
            raise Unavailable("away")
        return await super().commit(compares, writes)


class Writer:
    """A leader that writes policies to a store."""

    def __init__(self, store: PickyStore) -> None:
        self.store = store
        self.mirror = Mirror(store, cluster := Cluster())
        self.written: list[str] = []
        never = RevisionEquals(StoreKey("absent"), NEVER)
        self.control = ControlPlane(
            store=store, cluster=cluster, mirror=self.mirror, fence=lambda: never, step_down=lambda: None
        )

    async def write(self, *policies: KubePolicy) -> None:
        await write_batch(self.control, [put(kinds.KUBE_POLICY, each) for each in policies], written=self._written)

    def _written(self, batch: Sequence[Put | Delete]) -> None:
        self.written += [each.key.rpartition("/")[2] for each in batch]

    def stored(self) -> dict[str, KubePolicy]:
        return {each.name: each for each in self.control.cluster.all(kinds.KUBE_POLICY)}


@pytest.fixture
async def writer() -> AsyncIterator[Writer]:
    async with PickyStore() as store:
        made = Writer(store)
        async with background(made.mirror.run(), name="mirror"):
            await made.mirror.wait_for(NEVER, within=10)
            yield made


def wide(name: str, cidrs: int) -> KubePolicy:
    to = tuple(PolicyPeer(ip_block=IpBlock(cidr=f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}/32")) for n in range(cidrs))
    selector = LabelSelector(match_labels={"app": "web"})
    return KubePolicy(
        namespace="ns", name=name, uid="7", spec=PolicySpec(pod_selector=selector, egress=(EgressRule(to=to),))
    )


async def test_a_policy_too_large_for_a_store_is_written_without_its_rules(writer: Writer) -> None:
    """It isolates the same pods in the same directions, and allows nothing; others in its batch are unchanged."""
    huge = wide("huge", LARGEST_VALUE // 30)
    await writer.write(policy("ns", "a"), huge, policy("ns", "z"))
    stored = writer.stored()
    assert (stored["a"], stored["z"]) == (policy("ns", "a"), policy("ns", "z"))
    kept = stored["huge"]
    assert "split it" in kept.fault
    assert (kept.uid, kept.spec.pod_selector) == ("7", huge.spec.pod_selector)
    assert (kept.spec.isolates_ingress, kept.spec.isolates_egress) == (True, True)
    assert not kept.spec.ingress
    assert not kept.spec.egress
    assert writer.written == ["a", "huge", "z"]
    await writer.write(huge)
    assert writer.written == ["a", "huge", "z"]  # stored already: no second write, no second Event


async def test_a_write_that_only_the_store_rejects_keeps_no_other_out(writer: Writer) -> None:
    writer.store.rejected = b"10.0.0.1/32"
    await writer.write(policy("ns", "a"), wide("b", 2), policy("ns", "z"))
    assert writer.stored().keys() == {"a", "b", "z"}
    assert writer.stored()["b"].fault == "request is too large"
    writer.store.rejected = b'"odd"'
    await writer.write(policy("ns", "odd"), policy("ns", "c"))  # it has no rules to remove
    assert writer.stored().keys() == {"a", "b", "c", "z"}


async def test_committed_writes_are_reported_when_the_store_fails_in_between(writer: Writer) -> None:
    writer.store.rejected = b"10.0.0.1/32"
    writer.store.away_after = 1
    with pytest.raises(Unavailable):
        await writer.write(policy("ns", "a"), wide("b", 2), policy("ns", "z"))
    assert writer.written == ["a"]


NAMES = ["a", "b"]
TENANTS = ["", "blue", "default"]


@given(st.data())
def test_the_store_converges_in_any_order(data: st.DataObject) -> None:
    """Full lists, watch events, Namespaces that change tenants, new leaders, and syncs at any time in between."""
    scene = Scene()
    wanted: dict[Any, dict[Any, model.Value]] = {kind: {} for kind in KINDS}
    listed: set[Any] = set()

    def send_event(kind: Any, value: model.Value, *, deleted: bool) -> None:
        key = kind.key_parts(value)
        if deleted:
            wanted[kind].pop(key, None)
        else:
            wanted[kind][key] = value
        if kind in listed:
            (scene.desired.remove if deleted else scene.desired.put)(kind, value)

    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["list", "event", "sync", "new leader"]))
        kind = data.draw(st.sampled_from(KINDS))
        space = data.draw(st.sampled_from(NAMES))
        value: model.Value
        if kind is kinds.KUBE_NAMESPACE:
            value = namespace(space, data.draw(st.sampled_from(TENANTS)))
        elif kind is kinds.KUBE_POLICY:
            value = policy(space, "p")
        elif kind is kinds.KUBE_SERVICE:
            value = service(space, address=data.draw(st.sampled_from(["10.96.0.1", "10.96.0.2"])))
        else:
            value = slice_of(space)
        match step:
            case "list":
                listed.add(kind)
                scene.desired.replace(kind, list(wanted[kind].values()))
            case "event":
                send_event(kind, value, deleted=data.draw(st.booleans()))
            case "sync":
                scene.sync()
            case _:
                scene.desired = KubeDesired(scene.world.cluster)
                listed.clear()
    for kind in KINDS:
        if kind not in listed:
            scene.desired.replace(kind, list(wanted[kind].values()))
    for name in NAMES:
        if kinds.KUBE_NAMESPACE in listed:
            send_event(kinds.KUBE_NAMESPACE, namespace(name), deleted=False)
    if kinds.KUBE_NAMESPACE not in listed:
        every = [wanted[kinds.KUBE_NAMESPACE].setdefault((name,), namespace(name)) for name in NAMES]
        scene.desired.replace(kinds.KUBE_NAMESPACE, every)
    scene.sync()
    homes = {each.name: each.labels.get(TENANT_LABEL, DEFAULT_TENANT) for each in _namespaces(wanted)}
    expected = {kind: set(map(kind.key_parts, values.values())) for kind, values in wanted.items()}
    for kind in (kinds.KUBE_SERVICE, kinds.KUBE_SLICE):
        expected[kind] = {(homes[space], space, *rest) for _, space, *rest in expected[kind]}
    assert {kind: set(map(kind.key_parts, scene.world.cluster.all(kind))) for kind in KINDS} == expected


def _namespaces(wanted: dict[Any, dict[Any, model.Value]]) -> list[KubeNamespace]:
    return [each for each in wanted[kinds.KUBE_NAMESPACE].values() if isinstance(each, KubeNamespace)]
