"""What Kubernetes declares is in the store: whoever leads, whatever was there before, in whatever order it comes."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weft.domain import kinds, model
from weft.domain.balancing.kube_objects import DeclaredService, EndpointSlice, KubeService, KubeSlice, ServiceSpec
from weft.domain.commits import Delete, Put
from weft.domain.ids import DEFAULT_TENANT, TenantName
from weft.domain.kinds import Kind
from weft.domain.placing import TENANT_LABEL
from weft.domain.planning import put
from weft.domain.policy.kube_objects import KubeNamespace, KubePolicy
from weft.master.declared import MOST_BYTES, MOST_WRITES, Declared, batches, plan_writes
from weft.testing.worlds import World

KINDS: tuple[Kind[Any], ...] = (kinds.KUBE_NAMESPACE, kinds.KUBE_POLICY, kinds.KUBE_SERVICE, kinds.KUBE_SLICE)


def namespace(name: str, tenant: str = "") -> KubeNamespace:
    return KubeNamespace(name=name, labels={TENANT_LABEL: tenant} if tenant else {})


def policy(space: str, name: str) -> KubePolicy:
    return KubePolicy(namespace=space, name=name)


def service(space: str, name: str = "web", *, tenant: str = "default", address: str = "10.96.0.1") -> KubeService:
    spec = ServiceSpec(cluster_ips=(address,))
    return KubeService(tenant=TenantName(tenant), namespace=space, name=name, service=DeclaredService(spec=spec))


def slice_of(space: str, name: str = "web", *, tenant: str = "default") -> KubeSlice:
    value = EndpointSlice(address_type="IPv4")
    return KubeSlice(tenant=TenantName(tenant), namespace=space, service_name=name, name=f"{name}-1", slice=value)


class Scene:
    """A cluster, and what is declared for it. `settle` commits as a leader does."""

    def __init__(self) -> None:
        self.world = World()
        self.world.put(model.Tenant(name=TenantName("blue")))
        self.declared = Declared(self.world.cluster)

    def settle(self) -> int:
        """How many writes it took."""
        count = 0
        for batch in batches(self.declared.take()):
            self.world.carry_out(plan_writes(batch, self.world.reading()))
            count += len(batch)
        return count

    def stored(self) -> list[model.Value]:
        return [each for kind in KINDS for each in self.world.cluster.all(kind)]


def test_services_belong_to_the_tenant_of_their_namespace() -> None:
    scene = Scene()
    scene.declared.replace(kinds.KUBE_SERVICE, [service("ns"), service("other")])
    scene.declared.replace(kinds.KUBE_SLICE, [slice_of("ns")])
    assert scene.settle() == 0  # whose they are is not known yet
    scene.declared.replace(kinds.KUBE_NAMESPACE, [namespace("ns", "blue"), namespace("other")])
    scene.settle()
    assert scene.stored()[2:] == [service("ns", tenant="blue"), service("other"), slice_of("ns", tenant="blue")]
    scene.declared.put(kinds.KUBE_NAMESPACE, namespace("ns"))
    scene.settle()
    assert scene.stored()[2:] == [service("ns"), service("other"), slice_of("ns")]


def test_a_service_that_is_heard_of_before_its_namespace_waits_for_it() -> None:
    scene = Scene()
    for kind in KINDS:
        scene.declared.replace(kind, [])
    scene.declared.put(kinds.KUBE_SERVICE, service("new"))
    assert scene.settle() == 0
    scene.declared.put(kinds.KUBE_NAMESPACE, namespace("new", "blue"))
    scene.settle()
    assert scene.stored()[1:] == [service("new", tenant="blue")]


def test_nothing_is_deleted_before_a_whole_listing() -> None:
    scene = Scene()
    scene.world.carry_out(scene.world.reading().plan([put(kinds.KUBE_POLICY, policy("ns", "old"))]))
    scene.declared.replace(kinds.KUBE_NAMESPACE, [])
    assert scene.settle() == 0
    scene.declared.replace(kinds.KUBE_POLICY, [policy("ns", "new")])
    scene.settle()
    assert scene.stored() == [policy("ns", "new")]


def test_what_is_so_already_is_not_written_again() -> None:
    scene = Scene()
    for _ in range(2):
        scene.declared.replace(kinds.KUBE_NAMESPACE, [namespace("ns")])
        scene.declared.replace(kinds.KUBE_SERVICE, [service("ns")])
        count = scene.settle()
    assert count == 0
    scene.declared.put(kinds.KUBE_SERVICE, service("ns"))
    assert scene.settle() == 0


def test_what_cannot_be_kept_harms_nothing_else() -> None:
    scene = Scene()
    scene.declared.replace(kinds.KUBE_POLICY, [policy("ns", "a/b"), policy("ns", "good")])
    scene.settle()
    assert scene.stored() == [policy("ns", "good")]


def test_commits_are_such_as_any_store_takes() -> None:
    many = [put(kinds.KUBE_POLICY, policy("ns", f"p{number}")) for number in range(MOST_WRITES * 2 + 1)]
    assert [len(batch) for batch in batches(iter(many))] == [MOST_WRITES, MOST_WRITES, 1]
    large = [Put(each.key, b"x" * (MOST_BYTES // 2)) for each in many[:4]]
    assert [len(batch) for batch in batches(iter([*large, Delete(many[4].key)]))] == [2, 3]
    assert not list(batches(iter([])))


NAMES = ["a", "b"]
TENANTS = ["", "blue", "default"]


@given(st.data())
def test_the_store_is_as_declared_whatever_the_order(data: st.DataObject) -> None:
    """Listings, news, moves of namespaces between tenants and new leaders, and settling at any time between."""
    scene = Scene()
    wanted: dict[Any, dict[Any, model.Value]] = {kind: {} for kind in KINDS}
    listed: set[Any] = set()

    def tell(kind: Any, value: model.Value, *, gone: bool) -> None:
        key = kind.key_parts(value)
        if gone:
            wanted[kind].pop(key, None)
        else:
            wanted[kind][key] = value
        if kind in listed:
            (scene.declared.remove if gone else scene.declared.put)(kind, value)

    for _ in range(data.draw(st.integers(1, 25))):
        step = data.draw(st.sampled_from(["list", "tell", "settle", "new leader"]))
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
                scene.declared.replace(kind, list(wanted[kind].values()))
            case "tell":
                tell(kind, value, gone=data.draw(st.booleans()))
            case "settle":
                scene.settle()
            case _:
                scene.declared = Declared(scene.world.cluster)
                listed.clear()
    for kind in KINDS:
        if kind not in listed:
            scene.declared.replace(kind, list(wanted[kind].values()))
    for name in NAMES:
        if kinds.KUBE_NAMESPACE in listed:
            tell(kinds.KUBE_NAMESPACE, namespace(name), gone=False)
    if kinds.KUBE_NAMESPACE not in listed:
        every = [wanted[kinds.KUBE_NAMESPACE].setdefault((name,), namespace(name)) for name in NAMES]
        scene.declared.replace(kinds.KUBE_NAMESPACE, every)
    scene.settle()
    homes = {each.name: each.labels.get(TENANT_LABEL, DEFAULT_TENANT) for each in _namespaces(wanted)}
    expected = {kind: set(map(kind.key_parts, values.values())) for kind, values in wanted.items()}
    for kind in (kinds.KUBE_SERVICE, kinds.KUBE_SLICE):
        expected[kind] = {(homes[space], space, *rest) for _, space, *rest in expected[kind]}
    assert {kind: set(map(kind.key_parts, scene.world.cluster.all(kind))) for kind in KINDS} == expected


def _namespaces(wanted: dict[Any, dict[Any, model.Value]]) -> list[KubeNamespace]:
    return [each for each in wanted[kinds.KUBE_NAMESPACE].values() if isinstance(each, KubeNamespace)]
