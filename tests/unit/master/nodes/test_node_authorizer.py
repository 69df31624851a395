"""What a node may do with the store, decided at the very moment of the commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain import codec
from weft.domain.errors import Denied, NotFound, Stale
from weft.domain.ids import EndpointId, NetworkName, NodeName, StoreKey, TenantName
from weft.domain.model import Block, Endpoint
from weft.domain.store_types import NEVER, Compare, Delete, LeaseId, Put, Revision, RevisionEquals, Write
from weft.master.nodes.node_authorizer import NodeStore, lease_key

ME, OTHER = NodeName("node-1"), NodeName("node-2")
E = StoreKey("endpoints/red/blue/e")
STATUS = StoreKey(f"status/nodes/{ME}/x")


def endpoint(host: str, interface: str = "") -> bytes:
    return codec.encode(
        Endpoint(
            tenant=TenantName("red"),
            network=NetworkName("blue"),
            endpoint_id=EndpointId("e"),
            host=host,
            interface=interface,
        )
    )


class Racing(MemoryStore):
    """A store in which others write just before a commit."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Write] = []
        self.commits = 0

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        self.commits += 1
        if self.others:
            await super().commit([], [self.others.pop(0)])
        return await super().commit(compares, writes)


@pytest.fixture
async def store() -> AsyncIterator[Racing]:
    async with Racing() as opened:
        yield opened


@pytest.fixture
def mine(store: Racing) -> NodeStore:
    return NodeStore(store, ME)


async def test_what_is_its_own_is_written(store: Racing, mine: NodeStore) -> None:
    revision = await mine.commit([RevisionEquals(E, NEVER)], [Put(E, endpoint(ME))])
    entry = await store.read(E)
    assert entry is not None
    assert entry.revision == revision


async def test_what_is_not_is_denied_and_not_written(store: Racing, mine: NodeStore) -> None:
    with pytest.raises(Denied):
        await mine.commit([], [Put(STATUS, b""), Put(StoreKey("leader"), b"")])
    assert await store.read(STATUS) is None


async def test_an_endpoint_that_moves_away_in_the_last_moment_is_not_overwritten(
    store: Racing, mine: NodeStore
) -> None:
    await mine.commit([], [Put(E, endpoint(ME))])
    store.others = [Put(E, endpoint(OTHER))]
    with pytest.raises(Denied):
        await mine.commit([], [Delete(E)])
    entry = await store.read(E)
    assert entry is not None
    assert entry.value == endpoint(OTHER)


async def test_a_change_in_the_last_moment_that_alters_no_right_is_no_hindrance(store: Racing, mine: NodeStore) -> None:
    await mine.commit([], [Put(E, endpoint(ME))])
    store.others = [Put(E, endpoint(ME, interface="v1")), Put(E, endpoint(ME, interface="v2"))]
    await mine.commit([], [Delete(E)])
    assert await store.read(E) is None


async def test_what_changes_for_ever_is_given_up(store: Racing, mine: NodeStore) -> None:
    await mine.commit([], [Put(E, endpoint(ME))])
    store.others = [Put(E, endpoint(ME, interface=f"v{n}")) for n in range(100)]
    with pytest.raises(Stale):
        await mine.commit([], [Delete(E)])


async def test_the_nodes_own_compare_that_does_not_hold_is_stale_at_once(store: Racing, mine: NodeStore) -> None:
    with pytest.raises(Stale):
        await mine.commit([RevisionEquals(E, 77)], [Put(E, endpoint(ME))])
    assert store.commits == 0


async def test_what_another_took_a_moment_ago_is_stale_and_not_denied(store: Racing, mine: NodeStore) -> None:
    """Two nodes that take the same free block: the later one looks again, and takes the next."""
    block = StoreKey("blocks/red/blue/0a010100")
    await store.commit([], [Put(block, codec.encode(Block(owner=OTHER)))])
    with pytest.raises(Stale):
        await mine.commit([RevisionEquals(block, NEVER)], [Put(block, codec.encode(Block(owner=ME)))])
    with pytest.raises(Denied):
        await mine.commit([], [Put(block, codec.encode(Block(owner=ME)))])


async def test_a_lease_is_its_nodes_own(store: Racing, mine: NodeStore) -> None:
    theirs = NodeStore(store, OTHER)
    lease = await mine.grant(60)
    for refused in (
        theirs.keep_alive(lease),
        theirs.revoke(lease),
        theirs.commit([], [Put(StoreKey(f"status/nodes/{OTHER}/x"), b"", lease)]),
    ):
        with pytest.raises(Denied):
            await refused
    await mine.keep_alive(lease)
    await mine.commit([], [Put(STATUS, b"", lease)])
    await mine.revoke(lease)
    assert await store.read(STATUS) is None


async def test_a_lease_of_the_masters_is_out_of_reach(store: Racing, mine: NodeStore) -> None:
    lease = await store.grant(60)
    with pytest.raises(NotFound):
        await mine.keep_alive(lease)
    await mine.revoke(lease)
    await store.keep_alive(lease)


async def test_a_lease_leaves_nothing_behind(store: Racing, mine: NodeStore) -> None:
    lease = await mine.grant(60)
    assert await store.read(lease_key(lease)) is not None
    await NodeStore(store, ME).revoke(lease)
    assert await store.read(lease_key(lease)) is None
    await mine.revoke(lease)
    with pytest.raises(NotFound):
        await mine.keep_alive(LeaseId(lease))
