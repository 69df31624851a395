"""Publishes the endpoints of this node to the store, and withdraws them; reconciles records and store.

An ADD with an address of an own block does not wait for the store: its endpoint is published right after the answer, in
one commit with those of the ADDs around it. While the store is unreachable, publishing and withdrawing are postponed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.agent.store.node_ipam import BlockAllocator
from weft.agent.store.store_writer import StoreWriter
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.errors import Conflict, Invalid, NotFound, Unavailable
from weft.domain.ids import EndpointKey, NodeName
from weft.domain.lifecycle.changes import endpoints
from weft.domain.transaction import ReadSet, Transaction, put
from weft.runtime.backoff import Backoff
from weft.runtime.store.mirror import Mirror
from weft.runtime.tasks import background

RECONCILE_EVERY_S = 1.0
# The answer to the runtime goes first; it needs the loop for about a millisecond.
PUBLISH_AFTER_S = 0.002
# Endpoints that are attached within this time share one commit.
PUBLISH_EVERY_S = 0.02


class EndpointPublisher:
    """Keeps the store's endpoints of this node equal to the attachment records. Its `run` is the lease's session."""

    def __init__(
        self,
        *,
        node: NodeName,
        cluster: Cluster,
        mirror: Mirror,
        writer: StoreWriter,
        attachment_store: AttachmentStore,
        allocator: BlockAllocator,
    ) -> None:
        self._node = node
        self._cluster = cluster
        self._mirror = mirror
        self._writer = writer
        self._attachment_store = attachment_store
        self._allocator = allocator
        self._pending: set[EndpointKey] = set()
        self._last_publish = float("-inf")
        self._publish_due = asyncio.Event()
        # Whether endpoints without a record are leftovers. Not before those of a damaged log are restored.
        self.may_delete_unrecorded = not attachment_store.is_damaged

    def publish_soon(self, key: EndpointKey) -> None:
        """Schedule the commit of an endpoint; one that was published with its claims needs none."""
        attachment = self._attachment_store.get(key)
        if attachment is None or attachment.published:
            return
        if not self._pending:
            loop = asyncio.get_running_loop()
            due = max(loop.time() + PUBLISH_AFTER_S, self._last_publish + PUBLISH_EVERY_S)
            loop.call_at(due, self._publish_due.set)
        self._pending.add(key)

    async def withdraw(self, key: EndpointKey) -> None:
        """Delete an endpoint that is deconfigured, from the store and the records; an unknown one is deleted already.

        While the store is unreachable the record stays in stage `deleting`, and its addresses stay in use.
        """
        async with self._attachment_store.locks[key]:
            attachment = self._attachment_store.get(key)
            if attachment is not None:
                self._attachment_store.update(key, stage=Stage.DELETING, deconfigured=True)
                with suppress(Unavailable):
                    await self._delete(attachment)

    async def relabel(self, key: EndpointKey, *, labels: Mapping[str, str]) -> None:
        """Change the labels of an endpoint, in the store and in its record; one that is being deleted keeps its own.

        `NotFound` while the endpoint is not published yet, `Unavailable` while the store is unreachable.
        """
        async with self._attachment_store.locks[key]:
            attachment = self._attachment_store.get(key)
            if attachment is None or attachment.stage is Stage.DELETING:
                return
            await self._writer.write(partial(self._plan_relabel, attachment.endpoint, dict(labels)))
            # Read again: eviction does not take the lock, and may have changed the record during the commit.
            if (current := self._attachment_store.get(key)) is not None:
                endpoint = msgspec.structs.replace(current.endpoint, labels=dict(labels))
                self._attachment_store.put(msgspec.structs.replace(current, endpoint=endpoint))

    def _plan_relabel(
        self, endpoint: model.Endpoint, labels: dict[str, str], reading: ReadSet
    ) -> tuple[model.Endpoint, Transaction]:
        return endpoints.plan_update(
            reading,
            endpoint.key,
            labels=labels,
            container_id=endpoint.container_id,
            container_name=endpoint.container_name,
        )

    def unrecorded(self) -> list[model.Endpoint]:
        """The endpoints of this node in the store that have no record."""
        ours = [endpoint for endpoint in self._cluster.all(kinds.ENDPOINT) if endpoint.host == self._node]
        return [endpoint for endpoint in ours if self._attachment_store.get(endpoint.key) is None]

    def resync(self) -> None:
        """Mark the records for deletion whose endpoint the store has deleted, or whose address another one has by now.

        The mirror is complete up to the start of the session and nothing of ours is in flight, so this is certain.
        """
        self._allocator.resync()
        for attachment in self._attachment_store:
            if attachment.stage is Stage.DELETING:
                continue
            reading = ReadSet(self._cluster, self._mirror.revision)
            try:
                stored = reading.get(kinds.ENDPOINT, *attachment.key)
                if self._cluster.is_unreadable(kinds.ENDPOINT, *attachment.key):
                    continue  # `_reconcile` writes it again
                if attachment.published and (stored is None or not endpoints.is_same(stored, attachment.endpoint)):
                    raise NotFound(f"{attachment.key} was deleted from the store")
                if not attachment.published:
                    endpoints.plan_publish(reading, attachment.endpoint)
            except (NotFound, Conflict, Invalid):
                self._attachment_store.update(attachment.key, stage=Stage.DELETING)
            except Unavailable:
                continue  # a newer Weft wrote it: neither a proof of deletion nor ours to replace

    async def run(self) -> None:
        """Publish what is pending, and reconcile records and store every second, until cancelled."""
        async with background(self._publish_forever(), name=f"publisher of {self._node}"):
            pace = Backoff(first=RECONCILE_EVERY_S, cap=RECONCILE_EVERY_S)
            while True:
                await pace.pause()
                await self._reconcile()

    async def _reconcile(self) -> None:
        for attachment in self._attachment_store:
            # Checked without the lock first: a node has many records, and nearly all of them are in sync.
            if not self._is_in_sync(attachment):
                async with self._attachment_store.locks[attachment.key]:
                    await self._reconcile_one(attachment.key)
        if not self.may_delete_unrecorded:
            return
        for key in [endpoint.key for endpoint in self.unrecorded()]:
            async with self._attachment_store.locks[key]:
                # Left by an ADD whose commit had an unknown outcome. Looked up again: an ADD may have held the lock.
                if self._attachment_store.get(key) is None:
                    await self._delete_stored(key)
        # An address of a lost record may still be in use, although neither the store nor we know of it.
        if not self._attachment_store.is_damaged:
            await self._allocator.return_unused_blocks()

    def _is_in_sync(self, attachment: Attachment) -> bool:
        is_attached = attachment.published and attachment.stage is Stage.ATTACHED
        return is_attached and self._cluster.get(kinds.ENDPOINT, *attachment.key) is not None

    async def _reconcile_one(self, key: EndpointKey) -> None:
        attachment = self._attachment_store.get(key)
        if attachment is None:
            return
        if attachment.stage is Stage.DELETING:
            # With a configuration it is still in the datapath: eviction removes it first, else its address could be
            # allocated again while packets still leave from here.
            if attachment.config is None:
                await self._delete(attachment)
        elif not attachment.published:
            self._mark_published([await self._publish(key)])
        elif self._cluster.is_unreadable(kinds.ENDPOINT, *key):
            await self._writer.write(partial(self._plan_rewrite, attachment.endpoint))
        elif self._cluster.get(kinds.ENDPOINT, *key) is None:
            self._attachment_store.update(key, stage=Stage.DELETING)  # deleted by an operator or by node GC

    async def _publish_forever(self) -> None:
        """Publish all pending endpoints at once; those that come during a commit share the next one."""
        while True:
            await self._publish_due.wait()
            self._publish_due.clear()
            keys, self._pending = self._pending, set()
            self._last_publish = asyncio.get_running_loop().time()
            # The writer merges what is written at the same time into one commit.
            published = await asyncio.gather(*map(self._publish_if_connected, keys))
            with suppress(Unavailable):  # the log cannot be written: `_reconcile` publishes again, which is harmless
                self._mark_published(published)

    async def _publish_if_connected(self, key: EndpointKey) -> model.Endpoint | None:
        with suppress(Unavailable):  # `_reconcile` publishes it when the store is back
            return await self._publish(key)
        return None

    async def _publish(self, key: EndpointKey) -> model.Endpoint | None:
        """Commit an endpoint; the endpoint as the store has it now, or None when it was not published."""
        attachment = self._attachment_store.get(key)
        if attachment is None:
            return None
        try:
            is_published = await self._writer.write(partial(self._plan_publish, attachment.endpoint))
        except (Conflict, Invalid):
            # Another endpoint or node got the address or its block while this node was disconnected.
            if self._is_current(attachment.endpoint):
                self._attachment_store.update(key, stage=Stage.DELETING)
            return None
        return attachment.endpoint if is_published else None

    def _mark_published(self, published: Iterable[model.Endpoint | None]) -> None:
        current = [endpoint.key for endpoint in published if endpoint is not None and self._is_current(endpoint)]
        self._attachment_store.mark_published(current)

    def _plan_publish(self, endpoint: model.Endpoint, reading: ReadSet) -> tuple[bool, Transaction]:
        # Evaluated when the commit is built: a DEL may have come since publishing was scheduled.
        if not self._is_current(endpoint):
            return False, Transaction()
        return True, endpoints.plan_publish(reading, endpoint)

    def _plan_rewrite(self, endpoint: model.Endpoint, reading: ReadSet) -> tuple[None, Transaction]:
        """Replace the garbage that was written over an endpoint of ours; its claims and blocks are as they were."""
        if not self._is_current(endpoint) or not self._cluster.is_unreadable(kinds.ENDPOINT, *endpoint.key):
            return None, Transaction()
        reading.get(kinds.ENDPOINT, *endpoint.key)
        return None, reading.plan([put(kinds.ENDPOINT, endpoint)])

    def _is_current(self, endpoint: model.Endpoint) -> bool:
        """Whether this very endpoint is still recorded; another ADD may have recorded another one under its key."""
        attachment = self._attachment_store.get(endpoint.key)
        return attachment is not None and attachment.endpoint == endpoint and attachment.stage is not Stage.DELETING

    async def _delete(self, attachment: Attachment) -> None:
        """Delete from the store, then the record: as long as the store has the endpoint, its addresses are in use."""
        await self._delete_stored(attachment.key)
        self._allocator.start_cooldown(attachment.endpoint)
        self._attachment_store.delete(attachment.key)

    async def _delete_stored(self, key: EndpointKey) -> None:
        with suppress(NotFound):
            await self._writer.write(partial(self._plan_delete, key))

    def _plan_delete(self, key: EndpointKey, reading: ReadSet) -> tuple[None, Transaction]:
        """Delete only an endpoint of this node: another node may have one of the same key by now."""
        endpoint, transaction = endpoints.plan_delete(reading, key)
        return None, transaction if endpoint.host == self._node else Transaction()
