"""A policy that takes long is computed on a thread: the event loop goes on, and no endpoint is ever unfiltered."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator

import msgspec
import pytest
from tests.support.fake_cluster import DEFAULT, FakeCluster, network

from weft.agent.dataplane import policy as policy_module
from weft.agent.dataplane.policy import Policies, TenantPolicy
from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.addresses import parse_address
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import StateItem
from weft.domain.dns.names import Transports
from weft.domain.ids import EndpointId, NetworkName, NodeName, TenantName
from weft.domain.model import PodIdentity
from weft.domain.policy.compile import limits
from weft.domain.policy.compile.kube_objects import KubeNamespace, KubePolicy
from weft.domain.policy.model.netpol import IngressRule, IpBlock, NetworkPolicy, PolicyPeer, PolicySpec
from weft.domain.policy.model.rules import CompiledPolicy
from weft.domain.policy.policymap.policy_map import PolicyMap
from weft.domain.policy.policymap.policy_state import IpIdentity, PolicyEntry
from weft.domain.store_types import Delete
from weft.domain.transaction import put
from weft.lab.waiting import DEADLINE, until

NODE, OTHER = NodeName("one"), TenantName("other")


class Scene:
    """Two tenants, whose policies are always computed on a thread. `items` is what a datapath has got."""

    def __init__(self) -> None:
        self.world = FakeCluster()
        self.world.put(model.Tenant(name=OTHER))
        for tenant in (DEFAULT, OTHER):
            self.world.put(msgspec.structs.replace(network("blue", "10.1.1.0/24"), tenant=tenant))
        namespace = put(kinds.KUBE_NAMESPACE, KubeNamespace(name="shop"))
        self.world.carry_out(self.world.reading().plan([namespace]))
        self.attachment_store = AttachmentStore()
        self.policies = Policies(self.world.cluster, node=NODE, attachment_store=self.attachment_store)
        self.items: set[StateItem] = set()

    def pod(self, name: str, number: int, *, tenant: TenantName = DEFAULT) -> model.Endpoint:
        return model.Endpoint(
            tenant=tenant,
            network=NetworkName("blue"),
            endpoint_id=EndpointId(name),
            ip_address=f"10.1.1.{number}",
            host=NODE,
            labels={"app": name},
            pod=PodIdentity(namespace="shop", name=name, uid=name),
        )

    def change(self, policy: KubePolicy, *, delete: bool = False) -> None:
        key = kinds.KUBE_POLICY.store_key(policy.namespace, policy.name)
        write = Delete(key) if delete else put(kinds.KUBE_POLICY, policy)
        self.world.carry_out(self.world.reading().plan([write]))
        self.policies.follow(key)

    async def add(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        self.attachment_store.put(Attachment(endpoint=endpoint, published=True, stage=Stage.CONFIGURING))
        return self.take(await self.policies.attach(endpoint))

    async def remove(self, endpoint: model.Endpoint) -> None:
        self.attachment_store.update(endpoint.key, stage=Stage.DELETING)
        self.take(await self.policies.detach(endpoint))
        self.attachment_store.delete(endpoint.key)

    async def round(self) -> None:
        await self.policies.compute({DEFAULT, OTHER})
        self.take(self.policies.refresh({DEFAULT, OTHER}))

    async def read_back(self) -> None:
        async with self.policies.idle():
            self.items = set(self.policies.everything({DEFAULT, OTHER}))

    def take(self, difference: Difference[StateItem]) -> Difference[StateItem]:
        assert not self.items.intersection(difference.put)
        assert self.items.issuperset(difference.drop)
        self.items = (self.items - set(difference.drop)) | set(difference.put)
        return difference

    def expected(self) -> set[StateItem]:
        """What a node that starts now computes."""
        found: set[StateItem] = set()
        for tenant in (DEFAULT, OTHER):
            attached = [each.endpoint for each in self.attachment_store if each.key.tenant == tenant]
            fresh = TenantPolicy(self.world.cluster, tenant, node=NODE, attached=attached)
            found.update(fresh.refresh().put)
        return found


class Hold:
    """Lets the computation of the tenant `default` wait on its thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waiting, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        refresh = PolicyMap.refresh

        def held(policy_map: PolicyMap) -> object:
            if policy_map._tenant == DEFAULT and threading.current_thread() is not threading.main_thread():
                self.waiting.set()
                assert self.may_go_on.wait(DEADLINE)
            return refresh(policy_map)

        monkeypatch.setattr(PolicyMap, "refresh", held)

    def begin(self) -> None:
        self.waiting.clear()
        self.may_go_on.clear()


def policy(name: str, *blocks: str) -> KubePolicy:
    peers = tuple(PolicyPeer(ip_block=IpBlock(cidr=block)) for block in blocks)
    rules = (IngressRule(from_=peers),) if peers else ()
    return KubePolicy(namespace="shop", name=name, spec=PolicySpec(policy_types=("Ingress",), ingress=rules))


@pytest.fixture(params=["quick to compile", "slow to compile"])
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setattr(policy_module, "INLINE_RULES", -1)
    if request.param == "slow to compile":
        monkeypatch.setattr(policy_module, "QUICK_SIZE", -1)
    return Scene()


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hold]:
    made = Hold(monkeypatch)
    yield made
    made.may_go_on.set()


async def test_other_tenants_go_on_while_a_policy_is_computed(scene: Scene, hold: Hold) -> None:
    await scene.add(scene.pod("web", 1))
    scene.change(policy("p", "192.0.2.0/24"))
    hold.begin()
    computing = asyncio.create_task(scene.round())
    await until(hold.waiting.is_set)
    done = await scene.add(scene.pod("web", 1, tenant=OTHER))
    assert {item.tenant for item in done.put} == {OTHER}
    assert not computing.done()
    hold.may_go_on.set()
    await computing
    assert scene.items == scene.expected()


async def test_an_add_waits_until_its_policy_is_computed(scene: Scene, hold: Hold) -> None:
    """The port is opened by the identity, which comes with the policy entries or after them."""
    scene.change(policy("p", "192.0.2.0/24"))
    await scene.add(scene.pod("web", 1))
    hold.begin()
    scene.change(policy("p"))
    computing = asyncio.create_task(scene.round())
    await until(hold.waiting.is_set)
    adding = asyncio.create_task(scene.add(scene.pod("late", 2)))
    await asyncio.sleep(0)
    assert not adding.done()
    hold.may_go_on.set()
    await computing
    await adding
    # A round that ends at the same time may have handed over the identity before the ADD does.
    identities = {str(item.address): item.identity for item in scene.items if isinstance(item, IpIdentity)}
    identity = identities["10.1.1.2"]
    assert identity in {item.local for item in scene.items if isinstance(item, PolicyEntry)}
    assert scene.items == scene.expected()


async def test_what_changes_during_a_computation_is_computed_next(scene: Scene, hold: Hold) -> None:
    late: list[TenantName] = []
    scene.policies.on_late_change.append(late.append)
    await scene.add(scene.pod("web", 1))
    scene.change(policy("p", "192.0.2.0/24"))
    hold.begin()
    computing = asyncio.create_task(scene.round())
    await until(hold.waiting.is_set)
    scene.change(policy("q", "198.51.100.0/24"))
    assert not scene.policies.is_current({DEFAULT})
    hold.may_go_on.set()
    await computing
    assert late.count(DEFAULT) == 1
    assert not scene.policies.is_current({DEFAULT})
    await scene.round()
    assert scene.policies.is_current({DEFAULT})
    assert scene.items == scene.expected()


async def test_a_policy_that_is_slow_to_compile_is_not_compiled_on_the_event_loop(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS of an endpoint is denied until its policies are known, and as they say from then on."""
    monkeypatch.setattr(policy_module, "QUICK_SIZE", -1)
    threads: list[bool] = []
    may_go_on = threading.Event()

    def compile_bounded(document: NetworkPolicy) -> CompiledPolicy:
        threads.append(threading.current_thread() is threading.main_thread())
        assert may_go_on.wait(DEADLINE)
        return limits.compile_bounded(document)

    monkeypatch.setattr(policy_module, "compile_bounded", compile_bounded)
    scene.change(policy("p", "192.0.2.0/24"))
    adding = asyncio.create_task(scene.add(web := scene.pod("web", 1)))
    await until(lambda: bool(threads))
    tenant_policy, resolver = scene.policies.by_tenant[DEFAULT], (parse_address("192.0.2.53", field="resolver"),)
    assert tenant_policy.dns_egress_denied(web, resolver) is Transports.BOTH
    may_go_on.set()
    await adding
    assert threads == [False]
    assert tenant_policy.dns_egress_denied(web, resolver) is Transports.NONE


async def test_an_add_that_is_cancelled_leaves_the_thread_its_policy_map(scene: Scene, hold: Hold) -> None:
    scene.change(policy("p", "192.0.2.0/24"))
    await scene.add(scene.pod("web", 1))
    hold.begin()
    late = scene.pod("late", 2)
    adding = asyncio.create_task(scene.add(late))
    await until(hold.waiting.is_set)
    adding.cancel()
    removing = asyncio.create_task(scene.remove(late))
    await asyncio.wait([adding])
    assert not removing.done()
    hold.may_go_on.set()
    await removing
    await scene.round()
    assert scene.items == scene.expected()


@pytest.mark.parametrize("reading_back", [False, True])
async def test_a_listing_during_a_computation_leaves_nothing_behind(
    scene: Scene, hold: Hold, *, reading_back: bool
) -> None:
    scene.change(policy("p", "192.0.2.0/24"))
    await scene.add(scene.pod("web", 1))
    hold.begin()
    scene.change(policy("p", "198.51.100.0/24"))
    adding = asyncio.create_task(scene.add(scene.pod("late", 2)))
    await until(hold.waiting.is_set)
    scene.policies.replace()
    scene.change(policy("q"))
    scene.take(scene.policies.refresh({DEFAULT, OTHER}))
    following = asyncio.create_task(scene.read_back() if reading_back else scene.round())
    await asyncio.sleep(0)
    hold.may_go_on.set()
    await adding
    await following
    await scene.round()
    assert scene.items == scene.expected()


@pytest.mark.parametrize("seed", range(6))
async def test_concurrent_changes_lead_to_the_same_items_as_a_fresh_start(scene: Scene, seed: int) -> None:
    chance = random.Random(seed)
    pods = [scene.pod(f"pod-{i}", i, tenant=chance.choice((DEFAULT, OTHER))) for i in range(1, 9)]
    attached: set[str] = set()
    running: list[asyncio.Task[object]] = []
    for _ in range(60):
        step = chance.randrange(6)
        each = chance.choice(pods)
        if step == 0:
            scene.change(policy(chance.choice("pqr"), f"192.0.{chance.randrange(4)}.0/24", "10.0.0.0/8"))
        elif step == 1:
            scene.policies.replace()
        elif step == 2:
            running.append(asyncio.create_task(scene.round()))
        elif step == 3:
            await asyncio.gather(*running)
            running.clear()
            await scene.read_back()
        elif not any(not task.done() and task.get_name() == each.endpoint_id for task in running):
            work = scene.remove(each) if each.endpoint_id in attached else scene.add(each)
            attached ^= {each.endpoint_id}
            running.append(asyncio.create_task(work, name=each.endpoint_id))
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
    await asyncio.gather(*running)
    await scene.round()
    await scene.round()
    assert scene.items == scene.expected()
