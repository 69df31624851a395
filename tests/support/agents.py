"""A node's dealings with the store, alone: the agent's own `NodeIpam` without containers or packets around it."""

from __future__ import annotations

from weft.agent.store.attachment_store import AttachmentStore
from weft.agent.store.node_ipam import NodeIpam
from weft.domain import model
from weft.domain.cluster import Cluster
from weft.domain.ids import EndpointKey, NodeName
from weft.ports.store import Store
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background


class ReferenceAgent(NodeIpam):
    """A node that attaches at a word and forgets nothing while it lives."""

    def __init__(self, store: Store, *, node: NodeName, ttl: float, limit: float) -> None:
        cluster = Cluster()
        mirror = Mirror(store, cluster)
        super().__init__(
            store,
            node=model.Node(name=node),
            cluster=cluster,
            mirror=mirror,
            journal=AttachmentStore(),
            ttl=ttl,
            limit=limit,
        )

    async def run(self) -> None:
        async with background(self._mirror.run(), name=f"mirror of {self.node}"):
            await super().run()

    async def attach_as(self, key: EndpointKey, *, group: str = "", address: str = "") -> model.Endpoint:
        """Attach an endpoint that is nothing but a key."""
        tenant, network, name = key
        return await self.attach(
            model.Endpoint(
                tenant=tenant,
                network=network,
                endpoint_id=name,
                group=group,
                ip_address=address,
                host=self.node,
                container_id=name,
            )
        )
