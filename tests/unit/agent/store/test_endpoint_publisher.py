"""Endpoints are published in the background, in shared commits, and withdrawn even while the store is unreachable."""

from __future__ import annotations

import asyncio

from tests.support.slow_store import SlowStore, agent_on, key_of

from weft.agent.store.attachment_store import Stage
from weft.lab.waiting import eventually, soon, until


async def test_endpoints_attached_during_a_commit_share_the_next_one() -> None:
    store = SlowStore()
    async with agent_on(store) as agent:
        store.commits_endpoints.clear()
        await soon(asyncio.gather(*(agent.attach(key_of(f"e{number}")) for number in range(20))))
        store.commits_endpoints.set()
        await eventually(store.endpoints, lambda count: count == 21)
        assert len(store.published) <= 4


async def test_an_endpoint_detached_before_it_is_published_leaves_nothing() -> None:
    """The commit that publishes it is under way when it is detached."""
    store = SlowStore()
    async with agent_on(store) as agent:
        store.commits_endpoints.clear()
        await soon(agent.attach(key_of("second")))
        await until(lambda: len(store.published) == 2)
        detaching = asyncio.ensure_future(agent.detach(key_of("second")))
        await asyncio.sleep(0)
        store.commits_endpoints.set()
        await soon(detaching)
        assert await store.endpoints() == 1
        assert agent.attachment_store.get(key_of("second")) is None


async def test_an_endpoint_attached_again_is_published_with_its_new_address() -> None:
    store = SlowStore()
    async with agent_on(store) as agent:
        before = await soon(agent.attach(key_of("second")))
        await soon(agent.detach(key_of("second")))
        after = await soon(agent.attach(key_of("second")))
        assert after.ip_address != before.ip_address, "the former one is in cooldown"
        await eventually(store.endpoints, lambda count: count == 2)
        await until(lambda: (record := agent.attachment_store.get(key_of("second"))) is not None and record.published)


async def test_a_withdrawn_endpoint_keeps_its_address_until_the_store_has_deleted_it() -> None:
    """The store is unreachable: the record stays, in stage `deleting`, and the address is not allocated again."""
    store = SlowStore()
    async with agent_on(store) as agent:
        before = await soon(agent.attach(key_of("second")))
        await eventually(store.endpoints, lambda count: count == 2)
        store.is_away = True
        await soon(agent.detach(key_of("second")))
        record = agent.attachment_store.get(key_of("second"))
        assert record is not None
        assert record.stage is Stage.DELETING
        after = await soon(agent.attach(key_of("third")))
        assert after.ip_address != before.ip_address
        store.is_away = False
        await until(lambda: agent.attachment_store.get(key_of("second")) is None)
        await eventually(store.endpoints, lambda count: count == 2)
