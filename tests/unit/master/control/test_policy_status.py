"""Who declares a policy hears what has become of it."""

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
    """Two nodes, which carry out what is written when the test lets them; `told` is reason and message by name."""

    def __init__(self) -> None:
        world = FakeCluster()
        for name in ("one", "two"):
            node = model.Node(name=NodeName(name))
            world.carry_out(world.reading().plan([put(kinds.NODE, node)]))
        self.told: list[tuple[str, str, str]] = []
        self.late = ""
        self.asked = 0
        self.may_settle = asyncio.Event()
        self.in_force = PolicyStatus(world.cluster, self, settle=self.settle)

    async def settle(self) -> None:
        self.asked += 1
        await self.may_settle.wait()
        if self.late:
            raise Behind(self.late)

    def tell_of_policy(self, *, namespace: str, name: str, uid: str, reason: str, message: str, fault: bool) -> None:
        assert namespace == "shop"
        assert fault == (reason != "InForce")
        self.told.append((name, reason, message))

    async def hears(self, *told: tuple[str, str, str]) -> None:
        await until(lambda: sorted(self.told) == sorted(told))
        self.told.clear()


def written(name: str, *, fault: str = "") -> Put:
    return put(kinds.KUBE_POLICY, KubePolicy(namespace="shop", name=name, fault=fault))


async def test_policies_are_told_when_all_nodes_have_them_in_force() -> None:
    scene = Scene()
    async with background(scene.in_force.run(), name="in force"):
        scene.in_force.written([written("a"), written("b", fault="ingress[0]: no such member")])
        await until(lambda: scene.asked == 1)
        assert scene.told == []
        scene.in_force.written([written("c"), written("d")])
        scene.may_settle.set()
        broken = "in force on 2 nodes, but these rules are not understood and allow nothing: ingress[0]: no such member"
        expected = [("b", "NotUnderstood", broken), *((name, "InForce", "in force on 2 nodes") for name in "acd")]
        await scene.hears(*expected)
        assert scene.asked == 2  # what came meanwhile was asked about together


async def test_other_documents_and_deleted_policies_are_not_asked_about() -> None:
    scene = Scene()
    async with background(scene.in_force.run(), name="in force"):
        scene.in_force.written([Put(kinds.KUBE_NAMESPACE.store_key("shop"), b"{}"), Delete(written("x").key)])
        scene.in_force.written([written("a"), written("b")])
        await until(lambda: scene.asked == 1)
        scene.in_force.written([Delete(written("a").key)])
        scene.may_settle.set()
        await scene.hears(("b", "InForce", "in force on 2 nodes"))


async def test_a_node_that_is_behind_is_told_of_once_and_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_status, "AGAIN_FIRST_S", 0.01)
    scene = Scene()
    scene.may_settle.set()
    scene.late = "not in force on two (silent)"
    async with background(scene.in_force.run(), name="in force"):
        scene.in_force.written([written("a")])
        await until(lambda: scene.asked > 2)
        await scene.hears(("a", "NotInForce", scene.late))
        scene.late = ""
        await scene.hears(("a", "InForce", "in force on 2 nodes"))


async def test_a_policy_that_is_changed_while_nodes_are_asked_is_asked_about_anew() -> None:
    scene = Scene()
    async with background(scene.in_force.run(), name="in force"):
        scene.in_force.written([written("a", fault="old")])
        await until(lambda: scene.asked == 1)
        scene.in_force.written([written("a")])
        scene.may_settle.set()
        await scene.hears(("a", "InForce", "in force on 2 nodes"))
