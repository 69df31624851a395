"""Commits of the control plane: concurrent ones succeed, an unknown result makes it step down, a restore blocks all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Unavailable
from weft.domain.ids import NetworkName, StoreKey, TenantName
from weft.domain.store_types import NEVER, Compare, Delete, Put, Revision, RevisionEquals, Write
from weft.master.control.control import Condition, ControlPlane
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

RED = TenantName("red")
ALWAYS = RevisionEquals(StoreKey("absent"), NEVER)


class MuteStore(MemoryStore):
    """Commits, but returns no result while it is `mute`."""

    mute = False

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        revision = await super().commit(compares, writes)
        if self.mute:
            raise Unavailable("no answer")
        return revision


class Bench:
    """A control plane on a store in memory, with the tenant `red`."""

    def __init__(self, store: MuteStore) -> None:
        self.store = store
        self.step_downs = 0
        self.mirror = Mirror(store, cluster := Cluster())
        self.control = ControlPlane(
            store=store, cluster=cluster, mirror=self.mirror, fence=lambda: ALWAYS, step_down=self._step_down
        )

    def _step_down(self) -> None:
        self.step_downs += 1

    async def put_network(self, number: int) -> model.Network:
        subnet = f"10.0.{number}.0/24"
        network = model.Network(tenant=RED, name=NetworkName(f"n{number}"), encap="vxlan", subnet=subnet)
        return (await self.control.put(kinds.NETWORK, network, Condition())).value


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with MuteStore() as store:
        made = Bench(store)
        async with background(made.mirror.run(), name="mirror"):
            await made.mirror.wait_for(NEVER, within=10)
            await made.control.put(kinds.TENANT, model.Tenant(name=RED), Condition())
            yield made


async def test_concurrent_networks_all_succeed_with_distinct_tags(bench: Bench) -> None:
    """Each plan reads all networks, so only one of the concurrent commits can succeed at a time."""
    made = await asyncio.gather(*(bench.put_network(number) for number in range(60)))
    assert {network.tags.vni for network in made if network.tags} == set(range(1, 61))


async def test_an_unknown_result_steps_down_before_the_caller_gets_the_error(bench: Bench) -> None:
    bench.store.mute = True
    with pytest.raises(Unavailable, match="no answer"):
        await bench.put_network(1)
    assert bench.step_downs == 1
    bench.store.mute = False
    assert (await bench.put_network(1)).tags == model.NetworkTags(vlan=1, vni=1)


async def test_no_change_is_committed_during_a_restore_even_before_the_mirror_has_its_mark(bench: Bench) -> None:
    await bench.store.commit([], [Put(kinds.RESTORE_KEY, b"running")])
    assert not bench.control.cluster.restoring
    with pytest.raises(Unavailable, match="restore"):
        await bench.put_network(1)
    await bench.store.commit([], [Delete(kinds.RESTORE_KEY)])
    await bench.mirror.wait_for(await bench.store.commit([], []), within=10)
    await bench.put_network(1)
