"""What the store takes back while it is attached here: noticed with the very news of it, for it must not speak on.

From the moment an operator deletes an endpoint its address is free, and may be another's in the next commit.
"""

from __future__ import annotations

import asyncio

from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, TenantName
from weft.domain.store_types import Change, Listing
from weft.runtime.store.mirror import Sink


class Evictions:
    """The sink in front of the agent's own: it hands everything on, then looks for attachments that are gone.

    An ADD under way is left to itself: it looks when it has come to its end.
    """

    def __init__(self, sink: Sink, *, cluster: Cluster, journal: AttachmentStore) -> None:
        self._sink = sink
        self._cluster = cluster
        self._journal = journal
        # Set when an attachment is to be taken off.
        self.news = asyncio.Event()

    def replace(self, listing: Listing) -> None:
        self._sink.replace(listing)
        for note in self._journal:
            self._look_at(note)

    def apply(self, change: Change) -> None:
        self._sink.apply(change)
        for event in change.events:
            folder, *parts = event.key.split("/")
            if event.value is None and folder == kinds.ENDPOINT.prefix:
                tenant, network, name = parts
                note = self._journal.get(EndpointKey(TenantName(tenant), NetworkName(network), EndpointId(name)))
                if note is not None:
                    self._look_at(note)

    def _look_at(self, note: Attachment) -> None:
        is_gone = note.published and self._cluster.get(kinds.ENDPOINT, *note.key) is None
        if is_gone and note.stage is Stage.ATTACHED:
            self._journal.change(note.key, stage=Stage.LEAVING)
            self.news.set()
