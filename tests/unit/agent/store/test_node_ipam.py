"""Addresses of own blocks are allocated without the store (ADR 2)."""

from __future__ import annotations

from tests.support.slow_store import SlowStore, agent_on, key_of

from weft.domain.ids import StoreKey
from weft.lab.waiting import eventually, soon


async def test_an_address_of_an_own_block_is_allocated_while_the_store_is_slow() -> None:
    store = SlowStore()
    async with agent_on(store) as agent:
        store.commits_endpoints.clear()
        endpoint = await soon(agent.attach(key_of("second")))
        assert endpoint.ip_address
        assert await store.endpoints() == 1
        store.commits_endpoints.set()
        await eventually(store.endpoints, lambda count: count == 2)


async def test_an_add_that_loses_the_connection_waits_for_the_next_session() -> None:
    """The answer to its block is lost: the next session finds the block, and no second one is taken."""
    store = SlowStore()
    store.lost_block_answers = 1
    async with agent_on(store) as agent:
        assert store.lost_block_answers == 0
        assert agent.attachment_store.get(key_of("first")) is not None
        assert len((await store.list(StoreKey("blocks/"))).entries) == 1
