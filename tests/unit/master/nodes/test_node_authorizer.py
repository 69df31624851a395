"""Authorization of a node's writes, which must still hold at the moment of the commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from weft.adapters.stores.memory import MemoryStore
from weft.domain import codec
from weft.domain.errors import Denied, NotFound, Stale
from weft.domain.ids import EndpointId, NetworkName, NodeName, StoreKey, TenantName
from weft.domain.model import Block, Endpoint, Network
from weft.domain.store_types import NEVER, Compare, Delete, LeaseId, Put, Revision, RevisionEquals, Write
from weft.master.nodes.node_authorizer import NodeAuthorizer, lease_key

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
def mine(store: Racing) -> NodeAuthorizer:
    return NodeAuthorizer(store, ME)


async def test_a_node_writes_what_it_owns(store: Racing, mine: NodeAuthorizer) -> None:
    revision = await mine.commit([RevisionEquals(E, NEVER)], [Put(E, endpoint(ME))])
    entry = await store.read(E)
    assert entry is not None
    assert entry.revision == revision


async def test_other_writes_are_denied_and_not_committed(store: Racing, mine: NodeAuthorizer) -> None:
    with pytest.raises(Denied):
        await mine.commit([], [Put(STATUS, b""), Put(StoreKey("leader"), b"")])
    assert await store.read(STATUS) is None


async def test_an_endpoint_that_changes_owner_before_the_commit_is_not_overwritten(
    store: Racing, mine: NodeAuthorizer
) -> None:
    await mine.commit([], [Put(E, endpoint(ME))])
    store.others = [Put(E, endpoint(OTHER))]
    with pytest.raises(Denied):
        await mine.commit([], [Delete(E)])
    entry = await store.read(E)
    assert entry is not None
    assert entry.value == endpoint(OTHER)


async def test_a_concurrent_change_that_keeps_the_owner_is_retried(store: Racing, mine: NodeAuthorizer) -> None:
    await mine.commit([], [Put(E, endpoint(ME))])
    store.others = [Put(E, endpoint(ME, interface="v1")), Put(E, endpoint(ME, interface="v2"))]
    await mine.commit([], [Delete(E)])
    assert await store.read(E) is None


async def test_endless_conflicts_are_given_up(store: Racing, mine: NodeAuthorizer) -> None:
    await mine.commit([], [Put(E, endpoint(ME))])
    store.others = [Put(E, endpoint(ME, interface=f"v{n}")) for n in range(100)]
    with pytest.raises(Stale):
        await mine.commit([], [Delete(E)])


async def test_a_failed_compare_of_the_node_is_stale_at_once(store: Racing, mine: NodeAuthorizer) -> None:
    with pytest.raises(Stale):
        await mine.commit([RevisionEquals(E, 77)], [Put(E, endpoint(ME))])
    assert store.commits == 0


async def test_a_key_that_another_node_has_just_claimed_is_stale_not_denied(
    store: Racing, mine: NodeAuthorizer
) -> None:
    """Two nodes that take the same free block: the later one looks again, and takes the next."""
    block = StoreKey("blocks/red/blue/0a010100")
    network = Network(tenant=TenantName("red"), name=NetworkName("blue"), encap="vxlan", subnet="10.1.0.0/16")
    await store.commit([], [Put(StoreKey("networks/red/blue"), codec.encode(network))])
    await store.commit([], [Put(block, codec.encode(Block(owner=OTHER)))])
    with pytest.raises(Stale):
        await mine.commit([RevisionEquals(block, NEVER)], [Put(block, codec.encode(Block(owner=ME)))])
    with pytest.raises(Denied):
        await mine.commit([], [Put(block, codec.encode(Block(owner=ME)))])


async def test_a_lease_belongs_to_its_node(store: Racing, mine: NodeAuthorizer) -> None:
    theirs = NodeAuthorizer(store, OTHER)
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


async def test_a_masters_lease_is_denied(store: Racing, mine: NodeAuthorizer) -> None:
    lease = await store.grant(60)
    with pytest.raises(NotFound):
        await mine.keep_alive(lease)
    await mine.revoke(lease)
    await store.keep_alive(lease)


async def test_a_revoked_lease_leaves_no_keys(store: Racing, mine: NodeAuthorizer) -> None:
    lease = await mine.grant(60)
    assert await store.read(lease_key(lease)) is not None
    await NodeAuthorizer(store, ME).revoke(lease)
    assert await store.read(lease_key(lease)) is None
    await mine.revoke(lease)
    with pytest.raises(NotFound):
        await mine.keep_alive(LeaseId(lease))
