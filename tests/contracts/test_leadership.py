"""Leader election and presence on every store (R1, R2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import NamedTuple

import pytest

from weft.adapters.stores import etcd as etcd_store
from weft.adapters.stores import memory, remote, sqlite
from weft.domain.errors import Stale, Unavailable
from weft.domain.ids import StoreKey
from weft.lab.servers.etcd import Etcd
from weft.lab.waiting import soon
from weft.master.nodes.store_server import serving_store
from weft.ports.store import Delete, LeaseId, Put, Store
from weft.runtime.store.election import holders, lead
from weft.runtime.store.lease_keepalive import boottime
from weft.runtime.store.registry import Joined, Left, members, present

FOLDER = "status/nodes/node-1/"
LEADER = StoreKey(f"{FOLDER}leader")
MEMBERS = StoreKey(f"{FOLDER}members/")
ALICE = StoreKey(f"{MEMBERS}alice")
TTL = 1.0
LONG = 60.0


class TwoClients(NamedTuple):
    """Two independent clients of one store."""

    one: Store
    other: Store


@pytest.fixture(params=["memory", "sqlite", "etcd", "remote"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path, etcd: Etcd, root: str) -> AsyncIterator[TwoClients]:
    async with AsyncExitStack() as stack:
        match request.param:
            case "memory":
                shared: Store = await stack.enter_async_context(memory.open_store())
                yield TwoClients(shared, shared)
            case "sqlite":
                shared = await stack.enter_async_context(sqlite.open_store(tmp_path / "store.db"))
                yield TwoClients(shared, shared)
            case "etcd":
                clients = [etcd_store.open_store(etcd.endpoints, root=root) for _ in range(2)]
                yield TwoClients(*[await stack.enter_async_context(client) for client in clients])
            case "remote":
                behind = await stack.enter_async_context(sqlite.open_store(tmp_path / "store.db"))
                await stack.enter_async_context(serving_store(behind, unix=tmp_path / "store.sock"))
                agents = [remote.open_store([f"unix:{tmp_path}/store.sock"], node="node-1") for _ in range(2)]
                yield TwoClients(*[await stack.enter_async_context(agent) for agent in agents])


class TestR1Leadership:
    async def test_the_second_candidate_waits(self, stores: TwoClients) -> None:
        """R1: the first acquires, the second waits, and takes over at once when the first resigns."""
        led: list[str] = []

        async def second() -> None:
            async with lead(stores.other, key=LEADER, name=b"second", ttl=LONG):
                led.append("second")

        async with lead(stores.one, key=LEADER, name=b"first", ttl=LONG) as leadership:
            waiting = asyncio.create_task(second())
            entry = await stores.other.read(LEADER)
            assert entry is not None
            assert (entry.value, entry.revision) == (b"first", leadership.fence.revision)
            done, _ = await asyncio.wait([waiting], timeout=0.2)
            assert not done
            assert leadership.held
        await soon(waiting)
        assert led == ["second"]
        assert leadership.lost.is_set()
        assert await stores.one.read(LEADER) is None

    async def test_waiting_for_leadership_times_out(self, stores: TwoClients) -> None:
        """R1: a candidate may limit its wait."""
        async with lead(stores.one, key=LEADER, name=b"first", ttl=LONG) as leadership:
            with pytest.raises(Unavailable):
                async with lead(stores.other, key=LEADER, name=b"second", ttl=LONG, within=0.3):
                    raise AssertionError("two lead")
            assert leadership.held

    async def test_a_dead_leader_is_replaced_after_its_ttl(self, stores: TwoClients) -> None:
        """R1: the leader is killed, its lease expires, the next candidate takes over."""
        lease = await stores.one.grant(TTL)
        await stores.one.commit([], [Put(LEADER, b"dead", lease)])
        async with asyncio.timeout(60), lead(stores.other, key=LEADER, name=b"next", ttl=LONG) as leadership:
            entry = await stores.one.read(LEADER)
            assert entry is not None
            assert (entry.value, entry.revision) == (b"next", leadership.fence.revision)

    async def test_a_restarted_leader_takes_over_at_once(self, stores: TwoClients) -> None:
        lease = await stores.one.grant(LONG)
        earlier = await stores.one.commit([], [Put(LEADER, b"me", lease)])
        async with asyncio.timeout(30), lead(stores.other, key=LEADER, name=b"me", ttl=LONG) as leadership:
            assert leadership.fence.revision > earlier

    async def test_the_leader_lease_is_renewed(self, stores: TwoClients) -> None:
        async with lead(stores.one, key=LEADER, name=b"first", ttl=TTL) as leadership:
            for _ in range(2):  # twice the TTL
                lease = await stores.other.grant(TTL)
                await stores.other.commit([], [Put(ALICE, b"", lease)])
                await self.wait_until_deleted(stores.other, ALICE)
            assert leadership.held

    async def wait_until_deleted(self, store: Store, key: StoreKey) -> None:
        async with aclosing(holders(store, key)) as values, asyncio.timeout(30):
            async for value in values:
                if value is None:
                    return

    async def test_a_suspended_leader_knows_that_its_lease_may_have_expired(
        self, stores: TwoClients, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The loop's timers stop in suspend: at resume it must not answer for the old term until one fires."""
        async with lead(stores.one, key=LEADER, name=b"first", ttl=LONG) as leadership:
            assert leadership.held
            monkeypatch.setattr("weft.runtime.store.election.boottime", lambda: boottime() + LONG)
            assert not leadership.held

    @pytest.mark.parametrize("how", ["deleted", "overwritten"])
    async def test_a_deleted_leader_key_is_noticed_at_once(self, stores: TwoClients, how: str) -> None:
        async with lead(stores.one, key=LEADER, name=b"first", ttl=LONG) as leadership:
            await stores.other.commit([], [Delete(LEADER) if how == "deleted" else Put(LEADER, b"usurper")])
            await soon(leadership.lost.wait())
            assert leadership.reason

    async def test_the_fence_rejects_a_former_leader(self, stores: TwoClients) -> None:
        """A commit of a former leader fails, even if it does not know that it lost."""
        work = StoreKey(f"{FOLDER}work")
        async with lead(stores.one, key=LEADER, name=b"first", ttl=LONG) as leadership:
            await stores.one.commit([leadership.fence], [Put(work, b"1")])
            await stores.other.commit([], [Delete(LEADER)])
            async with lead(stores.other, key=LEADER, name=b"second", ttl=LONG) as successor:
                with pytest.raises(Stale):
                    await stores.one.commit([leadership.fence], [Put(work, b"2")])
                await stores.other.commit([successor.fence], [Put(work, b"3")])

    async def test_many_candidates_lead_in_turn(self, stores: TwoClients) -> None:
        leading: list[int] = []
        most = 0

        async def candidate(number: int) -> None:
            nonlocal most
            store = stores[number % 2]
            async with lead(store, key=LEADER, name=b"%d" % number, ttl=LONG) as leadership:
                leading.append(number)
                most = max(most, len(leading))
                await store.commit([leadership.fence], [])
                leading.remove(number)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            for number in range(6):
                tasks.create_task(candidate(number))
        assert most == 1

    async def test_leader_changes_are_watched(self, stores: TwoClients) -> None:
        async with aclosing(holders(stores.other, LEADER)) as names:
            assert await soon(anext(names)) is None
            async with lead(stores.one, key=LEADER, name=b"first", ttl=LONG):
                assert await soon(anext(names)) == b"first"
            assert await soon(anext(names)) is None


class TestR2Presence:
    async def test_a_member_is_registered_while_the_block_runs(self, stores: TwoClients) -> None:
        """R2: register, and an event for each join and leave."""
        async with aclosing(members(stores.other, MEMBERS)) as events:
            async with present(stores.one, key=ALICE, value=b"10.0.0.1", ttl=LONG):
                assert await soon(anext(events)) == Joined(ALICE, b"10.0.0.1")
            assert await soon(anext(events)) == Left(ALICE)

    async def test_a_watch_starts_with_the_present_members(self, stores: TwoClients) -> None:
        """R2: a watch lists the present members first."""
        async with (
            present(stores.one, key=ALICE, value=b"1", ttl=LONG),
            aclosing(members(stores.other, MEMBERS)) as events,
        ):
            assert await soon(anext(events)) == Joined(ALICE, b"1")

    async def test_presence_is_renewed_and_expires(self, stores: TwoClients) -> None:
        """R2: the lease is renewed while the member runs; a stopped member expires after its TTL."""
        bob = StoreKey(f"{MEMBERS}bob")
        async with (
            aclosing(members(stores.other, MEMBERS)) as events,
            present(stores.one, key=ALICE, value=b"", ttl=TTL),
        ):
            assert await soon(anext(events)) == Joined(ALICE, b"")
            for _ in range(2):
                lease = await stores.other.grant(TTL)
                await stores.other.commit([], [Put(bob, b"", lease)])
                assert await soon(anext(events)) == Joined(bob, b"")
                assert await soon(anext(events)) == Left(bob)

    async def test_a_lost_lease_is_replaced(self, stores: TwoClients, monkeypatch: pytest.MonkeyPatch) -> None:
        granted: list[LeaseId] = []
        grant = stores.one.grant

        async def recording_grant(ttl: float) -> LeaseId:
            granted.append(await grant(ttl))
            return granted[-1]

        monkeypatch.setattr(stores.one, "grant", recording_grant)
        async with (
            aclosing(members(stores.other, MEMBERS)) as events,
            present(stores.one, key=ALICE, value=b"", ttl=TTL),
        ):
            assert await soon(anext(events)) == Joined(ALICE, b"")
            await stores.other.revoke(granted[0])
            assert await soon(anext(events)) == Left(ALICE)
            assert await soon(anext(events)) == Joined(ALICE, b"")
