"""The agent's side of the hand-over: events say which objects to look at again, netdns is told what they bring now."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from weft.agent.dns.control_client import Conversation, conversation_with, tell
from weft.domain import kinds
from weft.domain.addresses import Address, parse_address
from weft.domain.cluster import Cluster
from weft.domain.dns.cluster_names import CLUSTER_DOMAIN
from weft.domain.dns.names import (
    NOTHING,
    Entry,
    KeepsIn,
    Zone,
    endpoint_owner,
    nobody,
    service_entry,
    service_owner,
    show_names,
)
from weft.domain.dns.zones import is_everywhere, kube_owner, stored_kube_entry, tenant_zone, workload_entry
from weft.domain.errors import Unavailable
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, TenantName
from weft.domain.model import Endpoint
from weft.domain.store_types import Change
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.dns_control import Entries, FullSync, Message, StatusQuery, Tenant
from weft.runtime.logs import Log

log = Log("names")

# How often netdns is asked whether it is still there, when there is nothing to say.
LOOK_EVERY_S = 30.0
# How long changed rules wait before netdns hears who may ask: they come in crowds, and the datapath has them first.
RULES_REST_S = 0.1
# How long a space that is to go waits for netdns to leave it.
WITHDRAWN_WITHIN_S = 1.0

_Key = tuple[str, ...]
# Contiv's names for counters (contiv 7.14).
_SHOWN = {"found": "foundNameRecord", "absent": "noNameRecord", "invalid": "invalidQuery"}


class NamePusher:
    """Keeps netdns told of the names of this node's tenants. The agent's mirror feeds it.

    A tenant is admitted when its space is there, and withdrawn before its space goes: sockets would keep it alive. When
    netdns is away, nothing waits for it; when it comes back it is told everything.
    """

    def __init__(
        self, cluster: Cluster, *, socket: Path, dns_egress_denied: KeepsIn = nobody, domain: str = CLUSTER_DOMAIN
    ) -> None:
        self._cluster = cluster
        self._socket = socket
        self._keeps_in = dns_egress_denied
        self._domain = domain
        self._admitted: set[TenantName] = set()
        self._tenants: set[TenantName] = set()
        self._objects: set[_Key] = set()
        # Workloads that are being attached here, until the store tells of them.
        self._coming: dict[EndpointKey, Endpoint] = {}
        self._ruled: set[TenantName] = set()
        self._kept_in: set[EndpointKey] = set()
        # Services of Kubernetes, by owner, of which every tenant has been told.
        self._shared: set[str] = set()
        self._news = asyncio.Event()
        self._hurry = asyncio.Event()
        self._turn = asyncio.Lock()
        self._answers = True
        # Whether netdns knows all that is to be known, or will in a moment.
        self.follows = False
        # Whom netdns asks about the outside, as it told last.
        self.resolvers: tuple[Address, ...] = ()

    def apply(self, change: Change) -> None:
        """Look again at what one revision changed."""
        for event in change.events:
            folder, *parts = event.key.split("/")
            if folder == kinds.SERVICE.prefix or (folder == kinds.ENDPOINT.prefix and self._is_news(parts)):
                self._touch((folder, *parts))
            elif folder in {kinds.KUBE_SERVICE.prefix, kinds.KUBE_SLICE.prefix}:
                self._touch((kinds.KUBE_SERVICE.prefix, *parts[:3]))
            elif folder == kinds.NETWORK.prefix and parts[0] in self._admitted:
                self._tenants.add(TenantName(parts[0]))
                self._tell_now()

    def expect(self, endpoint: Endpoint) -> None:
        """An endpoint has its rules and is about to come: it may ask before the store knows it."""
        if self._cluster.get(kinds.ENDPOINT, *endpoint.key) is None:
            self._coming[endpoint.key] = endpoint
        self._touch((kinds.ENDPOINT.prefix, *endpoint.key))

    def expect_no_more(self, key: EndpointKey) -> None:
        """An endpoint is about to leave; one that the store knows goes when the store says so."""
        if self._coming.pop(key, None) is not None:
            self._touch((kinds.ENDPOINT.prefix, *key))

    def _is_news(self, parts: Sequence[str]) -> bool:
        """Whether what the store says of an endpoint is more than netdns was told when it came."""
        key = EndpointKey(*parts)  # type: ignore[arg-type]
        coming, stored = self._coming.pop(key, None), self._cluster.get(kinds.ENDPOINT, *key)
        if coming is None or stored is None or stored.value != coming:
            return True
        return self._keeps_in(coming) is not (key in self._kept_in)

    def touch_rules(self, tenant: TenantName) -> None:
        """Look again, in a moment, at who of a tenant is kept in."""
        self._ruled.add(tenant)
        self._news.set()

    def _touch(self, key: _Key) -> None:
        self._objects.add(key)
        self._tell_now()

    def _tell_now(self) -> None:
        self._news.set()
        self._hurry.set()

    def add_endpoint(self, tenant: TenantName) -> None:
        """The tenant's space is there. To say it again is fine: all is told anew, and sockets leave an older space."""
        self._admitted.add(tenant)
        self._tenants.add(tenant)
        self._tell_now()

    async def withdraw(self, tenant: TenantName) -> None:
        """When this returns nothing of netdns is left in the tenant's space, unless it has not answered in time.

        Then it is told as soon as it answers, and nobody waits for it until it does.
        """
        self.forget(tenant)
        if not self._answers:
            return
        try:
            async with asyncio.timeout(WITHDRAWN_WITHIN_S), self._turn:
                await tell(self._socket, Tenant(tenant))
        except (Unavailable, TimeoutError) as error:
            self._answers = False
            log.warning("tenant not withdrawn from netdns", tenant=tenant, reason=str(error) or "no answer in time")

    def forget(self, tenant: TenantName) -> None:
        """The tenant's space is not there; netdns is told when it comes to it."""
        self._admitted.discard(tenant)
        self._tenants.add(tenant)
        self._tell_now()

    async def served(self) -> frozenset[TenantName]:
        """In whose spaces netdns is; in nobody's when it does not say."""
        try:
            async with asyncio.timeout(WITHDRAWN_WITHIN_S):
                return frozenset((await tell(self._socket, StatusQuery())).serving)
        except (Unavailable, TimeoutError):
            return frozenset()

    async def run(self) -> None:
        """Follow for ever. To be begun when the node is restored and its tenants are admitted, not before."""
        backoff = Backoff()
        told = ""
        while True:
            try:
                async with conversation_with(self._socket) as conversation:
                    await self._say_one(conversation, StatusQuery())  # whom it asks decides who may ask
                    await self._say(conversation, anew=True)
                    backoff.reset()
                    told = ""
                    self.follows = True
                    log.info("netdns follows", tenants=len(self._admitted))
                    await self._follow(conversation)
            except Unavailable as error:
                if error.message != told:  # it may be away for long: once is enough
                    log.warning("netdns does not follow", reason=error.message)
                told = error.message
                self._answers = self.follows = False
            self._tenants.clear()  # everything will be said anew
            self._objects.clear()
            self._ruled.clear()
            await backoff.pause()

    async def _follow(self, conversation: Conversation) -> None:
        while True:
            if await wait_event(self._news, within=LOOK_EVERY_S):
                await wait_event(self._hurry, within=RULES_REST_S)
                await self._say(conversation, anew=False)
            else:
                await self._say_one(conversation, StatusQuery())

    async def _say(self, conversation: Conversation, *, anew: bool) -> None:
        """Tell what is to be told. It is worked out in our turn, so that nobody is withdrawn meanwhile."""
        async with self._turn:
            self._news.clear()
            self._hurry.clear()
            tenants, self._tenants = self._tenants, set()
            objects, self._objects = self._objects | self._kept_otherwise(), set()
            self._ruled.clear()
            if anew:
                everything = FullSync({tenant: self._zone(tenant) for tenant in self._admitted})
                await self._say_one(conversation, everything)
                return
            for tenant in tenants:
                zone = self._zone(tenant) if tenant in self._admitted else None
                await self._say_one(conversation, Tenant(tenant, zone))
            for message in self._changes(objects, self._admitted - tenants):
                await self._say_one(conversation, message)

    async def _say_one(self, conversation: Conversation, message: Message) -> None:
        """Say it. Where netdns has other resolvers than before, others may be kept in."""
        report = await conversation.say(message)
        self._answers = True
        resolvers = tuple(parse_address(each, field="resolver") for each in report.resolvers)
        if resolvers != self.resolvers:
            self.resolvers = resolvers
            self._tenants |= self._admitted
            self._tell_now()

    def _zone(self, tenant: TenantName) -> Zone:
        """The tenant's names, with those who are just coming."""
        documents = self._cluster.all(kinds.KUBE_SERVICE)
        self._shared.update(kube_owner(each.namespace, each.name) for each in documents if is_everywhere(each))
        zone = tenant_zone(self._cluster, tenant, dns_egress_denied=self._note_kept, domain=self._domain)
        coming = dict(self._endpoint(*key) for key in self._coming if key.tenant == tenant)
        return Zone(zone.entries | {owner: entry for owner, entry in coming.items() if entry != NOTHING}, zone.subnets)

    def _note_kept(self, endpoint: Endpoint) -> bool:
        """Whether an endpoint is kept in, of which netdns is told now."""
        kept = self._keeps_in(endpoint)
        (self._kept_in.add if kept else self._kept_in.discard)(endpoint.key)
        return kept

    def _kept_otherwise(self) -> set[_Key]:
        """The endpoints of tenants with other rules for which netdns has been told something else."""
        return {
            (kinds.ENDPOINT.prefix, *endpoint.key)
            for tenant in self._ruled & self._admitted
            for endpoint in self._cluster.all(kinds.ENDPOINT, tenant)
            if self._keeps_in(endpoint) is not (endpoint.key in self._kept_in)
        }

    def _changes(self, objects: set[_Key], tenants: set[TenantName]) -> list[Entries]:
        """What the objects bring now, by tenant."""
        found: defaultdict[TenantName, dict[str, Entry]] = defaultdict(dict)
        for folder, name, *rest in objects:
            tenant = TenantName(name)
            if folder == kinds.KUBE_SERVICE.prefix:
                for each, owner, entry in self._kube(tenant, *rest):
                    if each in tenants:
                        found[each][owner] = entry
            elif tenant in tenants:
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

    def _kube(self, tenant: TenantName, namespace: str, name: str) -> Iterator[tuple[TenantName, str, Entry]]:
        """What a service of Kubernetes brings to whom: to its own tenant, and to the others if it is shared."""
        owner = kube_owner(namespace, name)
        entry, is_shared = stored_kube_entry(self._cluster, tenant, namespace, name, domain=self._domain)
        yield tenant, owner, entry
        if is_shared or owner in self._shared:
            (self._shared.add if is_shared else self._shared.discard)(owner)
            for other in self._admitted - {tenant}:
                yield other, owner, entry if is_shared else NOTHING

    def _endpoint(self, tenant: TenantName, network: str, endpoint: str) -> tuple[str, Entry]:
        key = EndpointKey(tenant, NetworkName(network), EndpointId(endpoint))
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        known = stored.value if stored else self._coming.get(key)
        if known is None:
            self._kept_in.discard(key)
        entry = workload_entry(known, dns_egress_denied=self._note_kept, domain=self._domain) if known else NOTHING
        return endpoint_owner(network, endpoint), entry

    async def inspect(self) -> dict[str, Any]:
        """`/inspect/nameserver` (contiv 6.7). `Unavailable` while netdns is away."""
        report = await tell(self._socket, StatusQuery())
        zones = {tenant: self._zone(tenant) for tenant in self._admitted}
        services = sum(key[0] == kinds.SERVICE.prefix for key in self._objects)
        return {
            "serviceQueue": services,
            "endpointQueue": len(self._objects) - services,
            "dnsRecords": show_names(zones),
            "serving": list(report.serving),
            "stats": {_SHOWN.get(name, name): count for name, count in report.statistics.items()},
        }
