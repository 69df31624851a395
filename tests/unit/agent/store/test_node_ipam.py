"""A node gives out addresses of its own blocks without waiting for the store, which is told beside it (ADR 2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.support.agents import ReferenceAgent

from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds, model
from weft.domain.errors import Unavailable
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, NodeName, StoreKey, TenantName
from weft.domain.store_types import Compare, Put, Revision, Write
from weft.domain.transaction import put
from weft.lab.waiting import eventually, soon, until
from weft.runtime.tasks import background

TENANT, NETWORK = TenantName("default"), NetworkName("blue")
LARGE = model.Network(tenant=TENANT, name=NETWORK, encap="vxlan", subnet="10.1.0.0/16", gateway="10.1.0.1")


def named(name: str) -> EndpointKey:
    return EndpointKey(TENANT, NETWORK, EndpointId(name))


class Slow(MemoryStore):
    """A store that hears of endpoints only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.hears = asyncio.Event()
        self.hears.set()
        # Of how many endpoints each commit told.
        self.told: list[int] = []
        # How many times it is not known what became of a commit that takes a block.
        self.fails_over_blocks = 0

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        count = sum(isinstance(write, Put) and write.key.startswith("endpoints/") for write in writes)
        if count:
            self.told.append(count)
            await self.hears.wait()
        revision = await super().commit(compares, writes)
        takes = any(isinstance(write, Put) and write.key.startswith("blocks/") for write in writes)
        if self.fails_over_blocks and takes:
            self.fails_over_blocks -= 1
            raise Unavailable("the answer was lost")
        return revision

    async def endpoints(self) -> int:
        return len((await self.list(kinds.ENDPOINT.store_prefix())).entries)


@asynccontextmanager
async def agent_on(store: Slow) -> AsyncIterator[ReferenceAgent]:
    """A node that is in touch, with one endpoint, so that it has a block."""
    async with store:
        await store.commit([], [put(kinds.TENANT, model.Tenant(name=TENANT)), put(kinds.NETWORK, LARGE)])
        agent = ReferenceAgent(store, node=NodeName("n1"), ttl=60.0, limit=60.0)
        async with background(agent.run(), name="agent"):
            await until(lambda: agent.connected)
            await soon(agent.attach_as(named("first")))
            await eventually(store.endpoints, lambda count: count == 1)
            yield agent


async def test_an_address_of_an_own_block_is_given_while_the_store_is_slow() -> None:
    store = Slow()
    async with agent_on(store) as agent:
        store.hears.clear()
        endpoint = await soon(agent.attach_as(named("second")))
        assert endpoint.ip_address
        assert await store.endpoints() == 1
        store.hears.set()
        await eventually(store.endpoints, lambda count: count == 2)


async def test_those_that_come_meanwhile_are_told_of_together() -> None:
    store = Slow()
    async with agent_on(store) as agent:
        store.hears.clear()
        await soon(asyncio.gather(*(agent.attach_as(named(f"e{number}")) for number in range(20))))
        store.hears.set()
        await eventually(store.endpoints, lambda count: count == 21)
        assert len(store.told) <= 4


async def test_one_that_leaves_before_the_store_has_heard_of_it_leaves_nothing() -> None:
    """The commit that tells of it is under way when it goes."""
    store = Slow()
    async with agent_on(store) as agent:
        store.hears.clear()
        await soon(agent.attach_as(named("second")))
        await until(lambda: len(store.told) == 2)
        leaving = asyncio.ensure_future(agent.detach(named("second")))
        await asyncio.sleep(0)
        store.hears.set()
        await soon(leaving)
        assert await store.endpoints() == 1
        assert agent.journal.get(named("second")) is None


async def test_one_that_comes_again_at_once_is_known_with_its_new_address() -> None:
    store = Slow()
    async with agent_on(store) as agent:
        before = await soon(agent.attach_as(named("second")))
        await soon(agent.detach(named("second")))
        after = await soon(agent.attach_as(named("second")))
        assert after.ip_address != before.ip_address, "it rests"
        await eventually(store.endpoints, lambda count: count == 2)
        await until(lambda: (note := agent.journal.get(named("second"))) is not None and note.published)


async def test_one_that_comes_while_touch_is_lost_waits_for_it_to_come_back() -> None:
    """The answer to its block is lost: when the node is in touch again it finds the block, and takes no second one."""
    store = Slow()
    store.fails_over_blocks = 1
    async with agent_on(store) as agent:
        assert store.fails_over_blocks == 0
        assert agent.journal.get(named("first")) is not None
        assert len((await store.list(StoreKey("blocks/"))).entries) == 1
