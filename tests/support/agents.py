"""The store side of an agent alone: lease, block allocator and endpoint publisher, without containers or packets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from weft.agent.store.attachment_store import AttachmentStore, Stage
from weft.agent.store.endpoint_publisher import EndpointPublisher
from weft.agent.store.node_ipam import BlockAllocator
from weft.agent.store.node_lease import NodeLease
from weft.agent.store.store_writer import StoreWriter
from weft.domain import model
from weft.domain.cluster import Cluster
from weft.domain.errors import Unavailable
from weft.domain.ids import EndpointKey, NetworkKey, NodeName
from weft.ports.store import Store
from weft.runtime.store.lease_keepalive import boottime
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background


class StoreSide(NamedTuple):
    """What an agent has towards the store, composed as `weft.agent.main` does."""

    lease: NodeLease
    allocator: BlockAllocator
    publisher: EndpointPublisher

    async def run(self) -> None:
        await self.lease.run(self.publisher)


def make_store_side(
    store: Store,
    *,
    node: model.Node,
    cluster: Cluster,
    mirror: Mirror,
    attachment_store: AttachmentStore,
    ttl: float,
    limit: float,
    clock: Callable[[], float] = boottime,
) -> StoreSide:
    writer = StoreWriter(store, cluster=cluster, mirror=mirror)
    lease = NodeLease(store, node=node, mirror=mirror, writer=writer, ttl=ttl, limit=limit, clock=clock)
    allocator = BlockAllocator(cluster=cluster, lease=lease, writer=writer, attachment_store=attachment_store)
    publisher = EndpointPublisher(
        node=node.name,
        cluster=cluster,
        mirror=mirror,
        writer=writer,
        attachment_store=attachment_store,
        allocator=allocator,
    )
    return StoreSide(lease, allocator, publisher)


class ReferenceAgent:
    """A node that attaches endpoints without a datapath, and keeps its records in memory."""

    def __init__(
        self, store: Store, *, node: NodeName, ttl: float, limit: float, clock: Callable[[], float] = boottime
    ) -> None:
        self.cluster = Cluster()
        self.attachment_store = AttachmentStore()
        self._mirror = Mirror(store, self.cluster)
        self._store_side = make_store_side(
            store,
            node=model.Node(name=node),
            cluster=self.cluster,
            mirror=self._mirror,
            attachment_store=self.attachment_store,
            ttl=ttl,
            limit=limit,
            clock=clock,
        )

    @property
    def node(self) -> NodeName:
        return self._store_side.lease.node

    @property
    def connected(self) -> bool:
        return self._store_side.lease.connected

    @property
    def refusal(self) -> str:
        return self._store_side.lease.refusal

    async def run(self) -> None:
        async with background(self._mirror.run(), name=f"mirror of {self.node}"):
            await self._store_side.run()

    async def attach(self, key: EndpointKey, *, group: str = "", address: str = "") -> model.Endpoint:
        """Reserve and publish, as ADD does before and after it configures the datapath."""
        tenant, network, name = key
        requested = model.Endpoint(
            tenant=tenant,
            network=network,
            endpoint_id=name,
            group=group,
            ip_address=address,
            host=self.node,
            container_id=name,
        )
        async with self.attachment_store.locks[key]:
            endpoint = await self._store_side.allocator.reserve(requested)
            self._store_side.publisher.publish_soon(key)
            self._store_side.lease.check_may_allocate()
            attachment = self.attachment_store.get(key)
            if attachment is None or attachment.stage is Stage.DELETING:
                raise Unavailable(f"{key} was deleted from the store while it was being attached")
            return endpoint

    async def detach(self, key: EndpointKey) -> None:
        await self._store_side.publisher.withdraw(key)

    async def return_blocks(self, network: model.Network) -> None:
        await self._store_side.allocator.return_blocks(network)

    def allocated(self) -> Iterator[tuple[NetworkKey, str, EndpointKey]]:
        """The addresses that this node treats as its own at this moment: network, address and endpoint."""
        if self._store_side.lease.may_allocate:
            for attachment in self.attachment_store:
                if attachment.stage is not Stage.DELETING:
                    for text in (attachment.endpoint.ip_address, attachment.endpoint.ipv6_address):
                        if text:
                            yield attachment.endpoint.network_key, text, attachment.key
