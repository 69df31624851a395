"""The agent's side of the hand-over: events say which objects to look at again, netdns is told what they bring now."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from pathlib import Path
from typing import Any

from weft.dns.client import Conversation, conversation_with, tell
from weft.dns.handover import Entries, Everything, Look, Tenant
from weft.domain import kinds
from weft.domain.cluster import Cluster
from weft.domain.commits import Change, Listing
from weft.domain.errors import Unavailable
from weft.domain.ids import EndpointKey, TenantName
from weft.domain.names import (
    NOTHING,
    Entry,
    KeepsIn,
    Zone,
    endpoint_entry,
    endpoint_owner,
    nobody,
    service_entry,
    service_owner,
    show_names,
    tenant_zone,
)
from weft.runtime.backoff import Backoff, happens
from weft.runtime.logs import Log

log = Log("names")

LOOK_EVERY_S = 30.0
"""How often netdns is asked whether it is still there, when there is nothing to say."""

_Key = tuple[str, ...]
_SHOWN = {"found": "foundNameRecord", "absent": "noNameRecord", "invalid": "invalidQuery"}
"""Contiv's names for counters (facts 7.14)."""


class NamePusher:
    """Keeps netdns told of the names of this node's tenants. The agent's mirror feeds it like any sink.

    A tenant is admitted when its space is there, and withdrawn before its space goes: sockets would keep it alive. When
    netdns is away, nothing waits for it; when it comes back it is told everything.
    """

    def __init__(self, cluster: Cluster, *, socket: Path, keeps_in: KeepsIn = nobody) -> None:
        self._cluster = cluster
        self._socket = socket
        self._keeps_in = keeps_in
        self._admitted: set[TenantName] = set()
        self._tenants: set[TenantName] = set()
        self._objects: set[_Key] = set()
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()

    def replace(self, _: Listing) -> None:
        """Everything may be different."""
        self._tenants |= self._admitted
        self._news.set()

    def apply(self, change: Change) -> None:
        """Look again at what one revision changed."""
        for event in change.events:
            folder, *parts = event.key.split("/")
            if folder in {kinds.ENDPOINT.prefix, kinds.SERVICE.prefix}:
                self._touch((folder, *parts))
            elif folder == kinds.NETWORK.prefix:
                self._tenants.add(TenantName(parts[0]))
                self._news.set()

    def touch(self, endpoint: EndpointKey) -> None:
        """Look again at an endpoint whose rules may be other ones."""
        self._touch((kinds.ENDPOINT.prefix, *endpoint))

    def _touch(self, key: _Key) -> None:
        self._objects.add(key)
        self._news.set()

    def admit(self, tenant: TenantName) -> None:
        """The tenant's space is there. To say it again is fine, and mends sockets that are in an older space."""
        self._admitted.add(tenant)
        self._tenants.add(tenant)
        self._news.set()

    async def withdraw(self, tenant: TenantName) -> None:
        """When this returns nothing of netdns is left in the tenant's space, unless it has not answered in time."""
        self._admitted.discard(tenant)
        async with self._turn:
            try:
                await tell(self._socket, Tenant(tenant))
            except Unavailable as error:
                log.warning("tenant not withdrawn from netdns", tenant=tenant, reason=error.message)

    async def run(self) -> None:
        """Follow for ever. To be begun when the node is restored and its tenants are admitted, not before."""
        backoff = Backoff()
        told = ""
        while True:
            try:
                async with conversation_with(self._socket) as conversation:
                    await self._say(conversation, anew=True)
                    backoff.reset()
                    told = ""
                    log.info("netdns follows", tenants=len(self._admitted))
                    await self._follow(conversation)
            except Unavailable as error:
                if error.message != told:  # it may be away for long: once is enough
                    log.warning("netdns does not follow", reason=error.message)
                told = error.message
            self._tenants.clear()  # everything will be said anew
            self._objects.clear()
            await backoff.pause()

    async def _follow(self, conversation: Conversation) -> None:
        while True:
            if await happens(self._news, within=LOOK_EVERY_S):
                await self._say(conversation, anew=False)
            else:
                await conversation.say(Look())

    async def _say(self, conversation: Conversation, *, anew: bool) -> None:
        """Tell what is to be told. It is worked out in our turn, so that nobody is withdrawn meanwhile."""
        async with self._turn:
            self._news.clear()
            tenants, self._tenants = self._tenants & self._admitted, set()
            objects, self._objects = self._objects, set()
            if anew:
                await conversation.say(Everything({tenant: self._zone(tenant) for tenant in self._admitted}))
                return
            for tenant in tenants:
                await conversation.say(Tenant(tenant, self._zone(tenant)))
            for message in self._changes(objects, self._admitted - tenants):
                await conversation.say(message)

    def _zone(self, tenant: TenantName) -> Zone:
        return tenant_zone(self._cluster, tenant, keeps_in=self._keeps_in)

    def _changes(self, objects: set[_Key], tenants: set[TenantName]) -> list[Entries]:
        """What the objects bring now, by tenant."""
        found: defaultdict[TenantName, dict[str, Entry]] = defaultdict(dict)
        for folder, name, *rest in objects:
            tenant = TenantName(name)
            if tenant in tenants:
                look = self._service if folder == kinds.SERVICE.prefix else self._endpoint
                owner, entry = look(tenant, *rest)
                found[tenant][owner] = entry
        return [
            Entries(
                tenant,
                put={owner: entry for owner, entry in entries.items() if entry != NOTHING},
                drop=tuple(owner for owner, entry in entries.items() if entry == NOTHING),
            )
            for tenant, entries in found.items()
        ]

    def _service(self, tenant: TenantName, name: str) -> tuple[str, Entry]:
        stored = self._cluster.get(kinds.SERVICE, tenant, name)
        return service_owner(name), service_entry(stored.value) if stored else NOTHING

    def _endpoint(self, tenant: TenantName, network: str, endpoint: str) -> tuple[str, Entry]:
        stored = self._cluster.get(kinds.ENDPOINT, tenant, network, endpoint)
        entry = endpoint_entry(stored.value, keeps_in=self._keeps_in) if stored else NOTHING
        return endpoint_owner(network, endpoint), entry

    async def inspect(self) -> dict[str, Any]:
        """`/inspect/nameserver` (facts 6.7). `Unavailable` while netdns is away."""
        report = await tell(self._socket, Look())
        zones = {tenant: self._zone(tenant) for tenant in self._admitted}
        services = sum(key[0] == kinds.SERVICE.prefix for key in self._objects)
        return {
            "serviceQueue": services,
            "endpointQueue": len(self._objects) - services,
            "dnsRecords": show_names(zones),
            "serving": list(report.serving),
            "stats": {_SHOWN.get(name, name): count for name, count in report.statistics.items()},
        }
