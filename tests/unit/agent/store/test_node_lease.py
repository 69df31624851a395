"""The node's lease: nothing is allocated without it, and another session follows when one is lost (ADR 2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.agents import ReferenceAgent
from tests.support.slow_store import LARGE, TENANT, SlowStore, agent_on, key_of

from weft.domain import kinds, model
from weft.domain.errors import Conflict, Denied, Invalid, Unavailable, WeftError
from weft.domain.ids import NodeName
from weft.domain.transaction import put
from weft.lab.waiting import soon, until
from weft.runtime.store.lease_keepalive import boottime
from weft.runtime.tasks import background


async def test_nothing_is_allocated_before_the_first_session() -> None:
    async with SlowStore() as store:
        await store.commit([], [put(kinds.TENANT, model.Tenant(name=TENANT)), put(kinds.NETWORK, LARGE)])
        store.is_away = True
        agent = ReferenceAgent(store, node=NodeName("n1"), ttl=60.0, limit=60.0)
        async with background(agent.run(), name="agent"):
            await until(lambda: agent.cluster.get(kinds.NETWORK, *LARGE.key) is not None)
            with pytest.raises(Unavailable, match="store unreachable longer than --offline-limit"):
                await soon(agent.attach(key_of("first")))
            assert not agent.connected
            store.is_away = False
            await until(lambda: agent.connected)
            assert (await soon(agent.attach(key_of("first")))).ip_address


async def test_a_session_writes_the_node_and_its_leased_key() -> None:
    store = SlowStore()
    async with agent_on(store) as agent:
        assert await store.read(kinds.NODE.store_key(agent.node)) is not None
        assert await store.read(kinds.alive_node(agent.node)) is not None


async def test_a_commit_of_unknown_outcome_begins_another_session() -> None:
    """The leased key has another revision then: whatever is still in flight under the former one fails."""
    store = SlowStore()
    async with agent_on(store) as agent:
        before = await store.read(kinds.alive_node(agent.node))
        store.lost_answers = 1
        await soon(agent.detach(key_of("first")))
        await until(lambda: agent.attachment_store.get(key_of("first")) is None)
        after = await store.read(kinds.alive_node(agent.node))
        assert before is not None
        assert after is not None
        assert after.revision > before.revision


async def test_within_the_offline_limit_own_blocks_are_used_without_the_store() -> None:
    store = SlowStore()
    async with agent_on(store) as agent:
        store.is_away = True
        assert (await soon(agent.attach(key_of("second")))).ip_address


@pytest.mark.parametrize("refusal", [Denied("not this node"), Invalid("no such format"), Conflict("not now")])
async def test_H2_a_refused_registration_is_retried(refusal: WeftError) -> None:
    """An agent that ended would leave its ports without policy updates, and come back into the same refusal."""
    async with SlowStore() as store:
        await store.commit([], [put(kinds.TENANT, model.Tenant(name=TENANT)), put(kinds.NETWORK, LARGE)])
        store.refusal = refusal
        agent = ReferenceAgent(store, node=NodeName("n1"), ttl=60.0, limit=60.0)
        async with background(agent.run(), name="agent"):
            await until(lambda: agent.refusal == refusal.message)
            assert not agent.connected
            store.refusal = None
            await until(lambda: agent.connected)
            assert agent.refusal == ""
            assert (await soon(agent.attach(key_of("first")))).ip_address


async def test_H2_a_refusal_is_forgotten_when_the_store_goes_away() -> None:
    async with SlowStore() as store:
        store.refusal = Denied("not this node")
        agent = ReferenceAgent(store, node=NodeName("n1"), ttl=60.0, limit=60.0)
        async with background(agent.run(), name="agent"):
            await until(lambda: agent.refusal != "")
            store.is_away = True
            await until(lambda: agent.refusal == "")


async def test_suspend_counts_as_time_without_the_store() -> None:
    """CLOCK_MONOTONIC stops in suspend, but node GC goes on counting: after it, the addresses may be another node's."""
    suspended = 0.0
    async with SlowStore() as store:
        await store.commit([], [put(kinds.TENANT, model.Tenant(name=TENANT)), put(kinds.NETWORK, LARGE)])
        agent = ReferenceAgent(store, node=NodeName("n1"), ttl=60.0, limit=3600.0, clock=lambda: boottime() + suspended)
        async with background(agent.run(), name="agent"):
            await until(lambda: agent.connected and agent.cluster.get(kinds.NETWORK, *LARGE.key) is not None)
            assert (await soon(agent.attach(key_of("first")))).ip_address
            store.is_away = True
            assert (await soon(agent.attach(key_of("second")))).ip_address
            suspended = 3601.0
            with pytest.raises(Unavailable, match="--offline-limit"):
                await soon(agent.attach(key_of("third")))


def test_the_clock_of_leases_counts_suspend() -> None:
    """`/proc/uptime` is CLOCK_BOOTTIME."""
    before = float(Path("/proc/uptime").read_text().split()[0])
    assert before - 1 < boottime() < before + 60
