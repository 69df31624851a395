"""Evictions: marks attachments for deletion as soon as the watch says that their endpoint was deleted from the store.

When an operator or node GC deletes an endpoint, its address is free: the next commit may give it to another endpoint.
So the attachment is removed at once, not at the next periodic round.
"""

from __future__ import annotations

import asyncio

from weft.agent.store.attachment_store import Attachment, AttachmentStore, Stage
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.store_keys import ObjectKey, parse_store_key
from weft.domain.store_types import Change, Listing


class Evictions:
    """A subscriber of the mirror, behind the cluster. `pending` is set when an attachment is to be removed."""

    def __init__(self, *, cluster: Cluster, attachment_store: AttachmentStore) -> None:
        self._cluster = cluster
        self._attachment_store = attachment_store
        self.pending = asyncio.Event()

    def replace(self, _: Listing) -> None:
        for attachment in self._attachment_store:
            self._check(attachment)

    def apply(self, change: Change) -> None:
        for event in change.events:
            if event.value is not None:
                continue
            parsed = parse_store_key(event.key)
            if isinstance(parsed, ObjectKey) and parsed.kind is kinds.ENDPOINT:
                attachment = self._attachment_store.get(parsed.endpoint)
                if attachment is not None:
                    self._check(attachment)

    def _check(self, attachment: Attachment) -> None:
        is_deleted = attachment.published and not self._cluster.exists(kinds.ENDPOINT, *attachment.key)
        # An ADD under way is left alone: it looks itself before it is answered.
        if is_deleted and attachment.stage is Stage.ATTACHED:
            self._attachment_store.update(attachment.key, stage=Stage.DELETING)
            self.pending.set()
