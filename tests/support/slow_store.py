"""A connected node on a store in memory that commits endpoints slowly, fails or loses answers, as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from tests.support.agents import ReferenceAgent

from weft.adapters.stores.memory import MemoryStore
from weft.domain import kinds, model
from weft.domain.errors import Unavailable, WeftError
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, NodeName, TenantName
from weft.domain.store_types import Compare, Put, Revision, Write
from weft.domain.transaction import put
from weft.lab.waiting import eventually, soon, until
from weft.runtime.tasks import background

TENANT, NETWORK = TenantName("default"), NetworkName("blue")
LARGE = model.Network(tenant=TENANT, name=NETWORK, encap="vxlan", subnet="10.1.0.0/16", gateway="10.1.0.1")


def key_of(name: str) -> EndpointKey:
    return EndpointKey(TENANT, NETWORK, EndpointId(name))


class SlowStore(MemoryStore):
    """A store that commits endpoints only when the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.commits_endpoints = asyncio.Event()
        self.commits_endpoints.set()
        # How many endpoints each commit had.
        self.published: list[int] = []
        # How many commits, or commits that take a block, are made but answered with an error.
        self.lost_answers = 0
        self.lost_block_answers = 0
        # Whether commits fail without being made.
        self.is_away = False
        # The error of every commit, which is not made.
        self.refusal: WeftError | None = None

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        if self.is_away:
            raise Unavailable("the store is down")
        if self.refusal:
            raise self.refusal
        count = sum(isinstance(write, Put) and write.key.startswith("endpoints/") for write in writes)
        if count:
            self.published.append(count)
            await self.commits_endpoints.wait()
        revision = await super().commit(compares, writes)
        takes = any(isinstance(write, Put) and write.key.startswith("blocks/") for write in writes)
        if self.lost_block_answers and takes:
            self.lost_block_answers -= 1
            raise Unavailable("the answer was lost")
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("the answer was lost")
        return revision

    async def endpoints(self) -> int:
        return len((await self.list(kinds.ENDPOINT.store_prefix())).entries)


@asynccontextmanager
async def agent_on(store: SlowStore) -> AsyncIterator[ReferenceAgent]:
    """A connected node with one endpoint, so that it has a block."""
    async with store:
        await store.commit([], [put(kinds.TENANT, model.Tenant(name=TENANT)), put(kinds.NETWORK, LARGE)])
        agent = ReferenceAgent(store, node=NodeName("n1"), ttl=60.0, limit=60.0)
        async with background(agent.run(), name="agent"):
            await until(lambda: agent.connected)
            await soon(agent.attach(key_of("first")))
            await eventually(store.endpoints, lambda count: count == 1)
            yield agent
