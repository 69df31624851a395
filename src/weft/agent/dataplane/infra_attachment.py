"""Keeps the host attached to every infra network there is. Who leaves a deleted one is told by the evictions."""

from __future__ import annotations

import asyncio

from weft.agent.cni.attachments import Attachments
from weft.agent.dataplane.infra_networks import host_endpoint
from weft.agent.store.attachment_store import AttachmentStore, Stage
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.errors import WeftError
from weft.domain.ids import NodeName
from weft.runtime.backoff import wait_event
from weft.runtime.logs import Log

log = Log("infra")

# After how long a network that could not be joined is tried again.
AGAIN_S = 1.0


class Joining:
    """See the module. `news` says that networks have changed."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        node: NodeName,
        journal: AttachmentStore,
        attachments: Attachments,
        news: asyncio.Event,
    ) -> None:
        self._cluster = cluster
        self._node = node
        self._journal = journal
        self._attachments = attachments
        self._news = news
        self._told = ""

    async def run(self) -> None:
        """Join what comes, for ever."""
        await self._attachments.ready.wait()
        while True:
            missing = await self._join_all()
            if missing:
                await wait_event(self._news, within=AGAIN_S)
            else:
                await self._news.wait()
            self._news.clear()

    async def _join_all(self) -> bool:
        """Whether some could not be joined."""
        missing = False
        for network in [each for each in self._cluster.all(kinds.NETWORK) if each.nw_type == "infra"]:
            note = self._journal.get(host_endpoint(network, self._node).key)
            if note is not None and note.stage is Stage.ATTACHED:
                continue
            try:
                await self._attachments.join(network)
            except WeftError as error:
                missing = True
                self._tell(f"{network.key}: {error.message}")
        return missing

    def _tell(self, reason: str) -> None:
        """The same is not told again and again."""
        if reason != self._told:
            log.warning("infra network not joined", reason=reason)
            self._told = reason
