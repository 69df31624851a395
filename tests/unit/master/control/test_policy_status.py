"""Events on NetworkPolicies: realized, not realized, or with unsupported rules."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.fake_cluster import FakeCluster

from weft.domain import kinds, model
from weft.domain.errors import Behind
from weft.domain.ids import NodeName
from weft.domain.policy.compile.kube_objects import KubePolicy
from weft.domain.store_types import Delete, Put
from weft.domain.transaction import put
from weft.lab.waiting import until
from weft.master.control import policy_status
from weft.master.control.policy_status import PolicyStatus
from weft.runtime.tasks import background


class Scene:
    """Two nodes, whose sync returns when the test lets it; `recorded` has name, reason and message of each Event."""

    def __init__(self) -> None:
        world = FakeCluster()
        for name in ("one", "two"):
            node = model.Node(name=NodeName(name))
            world.carry_out(world.reading().plan([put(kinds.NODE, node)]))
        self.recorded: list[tuple[str, str, str]] = []
        self.late = ""
        self.syncs = 0
        self.may_sync = asyncio.Event()
        self.policy_status = PolicyStatus(world.cluster, self, wait_for_sync=self.wait_for_sync)

    async def wait_for_sync(self) -> None:
        self.syncs += 1
        await self.may_sync.wait()
        if self.late:
            raise Behind(self.late)

    def record_policy_event(
        self, *, namespace: str, name: str, uid: str, reason: str, message: str, warning: bool
    ) -> None:
        assert namespace == "shop"
        assert warning == (reason != "Realized")
        self.recorded.append((name, reason, message))

    async def expect(self, *events: tuple[str, str, str]) -> None:
        await until(lambda: sorted(self.recorded) == sorted(events))
        self.recorded.clear()


def written(name: str, *, fault: str = "") -> Put:
    return put(kinds.KUBE_POLICY, KubePolicy(namespace="shop", name=name, fault=fault))


async def test_events_are_recorded_when_all_nodes_have_realized_the_policies() -> None:
    scene = Scene()
    async with background(scene.policy_status.run(), name="policy status"):
        scene.policy_status.written([written("a"), written("b", fault="ingress[0]: no such member")])
        await until(lambda: scene.syncs == 1)
        assert scene.recorded == []
        scene.policy_status.written([written("c"), written("d")])
        scene.may_sync.set()
        message = "realized on 2 nodes, but these rules are not supported and allow nothing: ingress[0]: no such member"
        expected = [("b", "UnsupportedRules", message), *((name, "Realized", "realized on 2 nodes") for name in "acd")]
        await scene.expect(*expected)
        assert scene.syncs == 2  # policies written meanwhile share one sync


async def test_other_documents_and_deleted_policies_get_no_events() -> None:
    scene = Scene()
    async with background(scene.policy_status.run(), name="policy status"):
        scene.policy_status.written([Put(kinds.KUBE_NAMESPACE.store_key("shop"), b"{}"), Delete(written("x").key)])
        scene.policy_status.written([written("a"), written("b")])
        await until(lambda: scene.syncs == 1)
        scene.policy_status.written([Delete(written("a").key)])
        scene.may_sync.set()
        await scene.expect(("b", "Realized", "realized on 2 nodes"))


async def test_a_node_that_is_behind_causes_one_warning_and_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_status, "RETRY_FIRST_S", 0.01)
    scene = Scene()
    scene.may_sync.set()
    scene.late = "not realized on two (Unreachable)"
    async with background(scene.policy_status.run(), name="policy status"):
        scene.policy_status.written([written("a")])
        await until(lambda: scene.syncs > 2)
        await scene.expect(("a", "NotRealized", scene.late))
        scene.late = ""
        await scene.expect(("a", "Realized", "realized on 2 nodes"))


async def test_a_policy_that_changes_during_a_sync_needs_another_sync() -> None:
    scene = Scene()
    async with background(scene.policy_status.run(), name="policy status"):
        scene.policy_status.written([written("a", fault="old")])
        await until(lambda: scene.syncs == 1)
        scene.policy_status.written([written("a")])
        scene.may_sync.set()
        await scene.expect(("a", "Realized", "realized on 2 nodes"))
