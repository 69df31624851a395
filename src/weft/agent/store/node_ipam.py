"""Node IPAM: addresses from the node's own blocks without waiting for the store, or by claims in it (ADR 2).

While the store is unreachable the node goes on allocating from its own blocks. A released address is allocated again
only when the store knows of the release, and after a cooldown.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

import msgspec

from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.agent.store.node_lease import NodeLease
from weft.agent.store.store_writer import StoreWriter
from weft.domain import kinds, model
from weft.domain.addresses import Address, mac_of
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Exhausted, Invalid, Unavailable, WeftError
from weft.domain.ids import GroupKey, GroupName, NetworkKey
from weft.domain.ipam import ipam
from weft.domain.ipam.address_cooldown import Cooldown
from weft.domain.ipam.allocator import EMPTY, NumberSet
from weft.domain.lifecycle.changes import endpoints
from weft.domain.transaction import ReadSet, Transaction
from weft.runtime.backoff import Backoff
from weft.runtime.keyed_lock import KeyedLock

# How long an ADD waits for a connection that was lost while it took a block.
RECONNECT_WITHIN_S = 5.0


class BlockAllocator:
    """Allocates addresses for the endpoints of this node, and takes and returns its blocks."""

    def __init__(
        self, *, cluster: Cluster, lease: NodeLease, writer: StoreWriter, attachment_store: AttachmentStore
    ) -> None:
        self._cluster = cluster
        self._lease = lease
        self._writer = writer
        self._attachment_store = attachment_store
        # Of many ADDs that need a block or a claim at once, one writes to the store at a time: the others would only
        # conflict with it, and usually find an address in the block that it has taken.
        self._store_locks: KeyedLock[NetworkKey] = KeyedLock()
        # Blocks whose return is under way, or of unknown outcome: no address of them may be allocated.
        self._returning: set[tuple[NetworkKey, Address]] = set()
        self._cooldown = Cooldown()

    async def reserve(self, requested: model.Endpoint) -> model.Endpoint:
        """Reserve addresses for an endpoint and record it; an endpoint that has a record keeps its addresses.

        The caller holds the endpoint's lock. Undone by `EndpointPublisher.withdraw`.
        `Unavailable` when this needs the store and it is unreachable, or beyond the offline limit.
        """
        attachment = self._attachment_store.get(requested.key)
        if attachment is not None and attachment.stage is Stage.DELETING:
            raise Unavailable(f"{requested.key} is not deleted from the store yet")
        if attachment is not None:
            # Else two containers would share one port, and the second would get nothing.
            if attachment.id != (requested.container_id, requested.interface):
                container, interface = attachment.id
                raise Conflict(f"{requested.key} is {interface} of container {container} already")
            return attachment.endpoint
        tenant, name, _ = requested.key
        network = self._cluster.get(kinds.NETWORK, tenant, name)
        if network is None:
            raise Invalid(f"network {tenant}:{name} does not exist", field="networkName")
        group = self._cluster.group(GroupKey(tenant, GroupName(requested.group))) if requested.group else None
        if requested.group and (group is None or group.network != name):
            raise Invalid(f"network {name!r} has no group {requested.group!r}", field="serviceName")
        has_request = requested.ip_address or requested.ipv6_address
        if not has_request and ipam.gives_blocks(network.value, group):
            # When no block is left to take, single addresses of shared blocks may still be free: those are claimed.
            with suppress(Exhausted):
                return await self._reserve_from_blocks(requested, network.value)
        return await self._reserve_by_claims(requested)

    async def _reserve_from_blocks(self, requested: model.Endpoint, network: model.Network) -> model.Endpoint:
        while (chosen := self._choose(network)) is None:
            async with self._store_locks[network.key]:
                if self._choose(network) is None:  # else another ADD has taken a block while this one waited
                    await self._take_blocks_connected(network)
        # No await between choosing and recording: what is chosen is in use once it is recorded.
        endpoint = msgspec.structs.replace(
            requested,
            ip_address=str(chosen[4]),
            ipv6_address=str(chosen[6]) if 6 in chosen else "",
            mac_address=requested.mac_address or mac_of(chosen[4]),
        )
        self._attachment_store.put(Attachment(endpoint=endpoint, published=False, stage=Stage.ALLOCATED))
        return endpoint

    async def _reserve_by_claims(self, requested: model.Endpoint) -> model.Endpoint:
        """One commit creates claims and endpoint together: the endpoint is published with it."""
        async with self._store_locks[requested.network_key]:
            plan = partial(endpoints.plan_create, wanted=requested, busy=endpoints.Busy())
            endpoint = await self._writer.write(plan)
        if endpoint.host != self._lease.node:
            raise Conflict(f"{requested.key} is on node {endpoint.host!r}")
        self._attachment_store.put(Attachment(endpoint=endpoint, published=True, stage=Stage.ALLOCATED))
        return endpoint

    def start_cooldown(self, endpoint: model.Endpoint) -> None:
        """Keep the addresses of a deleted endpoint unused for a while: peers may still have connections to them."""
        now = asyncio.get_running_loop().time()
        for address in endpoint.addresses:
            self._cooldown.add(endpoint.network_key, address, now=now)

    def _choose(self, network: model.Network) -> dict[int, Address] | None:
        """An address of each family from our own blocks; None when one family has none left."""
        self._lease.check_may_allocate()
        cooling = self._cooldown.active(asyncio.get_running_loop().time())
        chosen: dict[int, Address] = {}
        for family in (4, 6):
            if ipam.subnet_of(network, family) is not None:
                address = self._choose_one(network, family, cooling=cooling.get((network.key, family), EMPTY))
                if address is None:
                    return None
                chosen[family] = address
        return chosen

    def _choose_one(self, network: model.Network, family: int, *, cooling: NumberSet = EMPTY) -> Address | None:
        return ipam.choose_from_blocks(
            self._cluster,
            network,
            self._lease.node,
            family=family,
            held=self._attachment_store.numbers_in_use(network.key, family),
            cooling=cooling,
            returning={block for key, block in self._returning if key == network.key},
        )

    async def _take_blocks_connected(self, network: model.Network) -> None:
        """Take blocks; try once more if the connection is lost over it and is soon back, as on a stalled machine."""
        was_connected = self._lease.connected
        try:
            await self._take_blocks(network)
        except Unavailable as lost:
            if not was_connected:
                raise
            backoff = Backoff(first=0.05, cap=0.25, within=RECONNECT_WITHIN_S)
            while not self._lease.connected:
                try:
                    await backoff.pause()
                except TimeoutError:
                    raise lost from None
            # The mirror has caught up by now: a block that the lost commit took is found, and no second one is taken.
            await self._take_blocks(network)

    async def _take_blocks(self, network: model.Network) -> None:
        """Take one block of each family that has no address left."""
        for family in (4, 6):
            if ipam.subnet_of(network, family) is not None and self._choose_one(network, family) is None:
                await self._writer.write(partial(self._plan_take, network, family))

    def _plan_take(self, network: model.Network, family: int, reading: ReadSet) -> tuple[Address, Transaction]:
        block, writes = ipam.take_block(reading, network, self._lease.node, family=family)
        return block, reading.plan(writes)

    def resync(self) -> None:
        """A new session knows the outcome of every return: the cluster says whose the blocks are."""
        self._returning.clear()

    async def return_unused_blocks(self) -> None:
        """Return the blocks of all networks in which this node has no endpoint."""
        used = {attachment.endpoint.network_key for attachment in self._attachment_store}
        for network in self._cluster.all(kinds.NETWORK):
            if network.key not in used and self._cluster.blocks.get(network.key):
                await self.return_blocks(network)

    async def return_blocks(self, network: model.Network) -> None:
        """Return the network's blocks of which no address is in use."""
        for family in (4, 6):
            for first, last in ipam.owned_blocks(self._cluster, network, self._lease.node, family=family):
                block = Address(family, first)
                if (network.key, block) not in self._returning and not self._is_used(network.key, family, first, last):
                    await self._return_block(network, block)

    def _is_used(self, network: NetworkKey, family: int, first: int, last: int) -> bool:
        stored = self._cluster.numbers_in_use(network, family)
        recorded = self._attachment_store.numbers_in_use(network, family)
        return any(numbers.next_taken(first, last) is not None for numbers in (stored, recorded))

    async def _return_block(self, network: model.Network, block: Address) -> None:
        self._returning.add((network.key, block))
        try:
            await self._writer.write(partial(self._plan_return, network, block))
        except WeftError:
            # Connected means that the outcome is known: the block is still ours. Else it stays unusable until `resync`.
            if self._lease.connected:
                self._returning.discard((network.key, block))
            raise
        self._returning.discard((network.key, block))

    def _plan_return(self, network: model.Network, block: Address, reading: ReadSet) -> tuple[None, Transaction]:
        return None, reading.plan(ipam.return_block(reading, network, self._lease.node, block))
