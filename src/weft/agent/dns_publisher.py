"""The DNS publisher: computes the zones of this node's tenants and keeps netdns in sync with them.

Store events mark objects as dirty; a push computes their records from the cluster as it is then. No endpoint may use
netdns to reach an upstream resolver that its own policy denies (CVE-2024-29018). That verdict follows from the
endpoint's policy, which is computed a moment after its name is known.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from weft.agent.dataplane.policy import TenantPolicy
from weft.domain import kinds
from weft.domain.addresses import Address, parse_address
from weft.domain.cluster import Cluster
from weft.domain.dns.names import (
    CLUSTER_DOMAIN,
    EMPTY_ENTRY,
    DnsEgressDenied,
    Entry,
    Transports,
    Zone,
    endpoint_owner,
    inspect_records,
    never_denied,
    service_entry,
    service_owner,
)
from weft.domain.dns.zones import is_in_every_tenant, kube_owner, stored_kube_entry, tenant_zone, workload_entry
from weft.domain.errors import Invalid, Unavailable
from weft.domain.ids import EndpointId, EndpointKey, NetworkName, NodeName, TenantName
from weft.domain.model import Endpoint
from weft.domain.policy.engine.engine_sync import SHARED_PREFIXES, TENANT_PREFIXES
from weft.domain.store_keys import ObjectKey, parse_store_key
from weft.domain.store_types import Change, Listing
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.dns_control import (
    ControlConnection,
    Entries,
    FullSync,
    Message,
    Report,
    StatusQuery,
    Tenant,
    connect_netdns,
    send_once,
)
from weft.runtime.logs import Log

log = Log("dns-publisher")

# How often netdns is checked when there is nothing to push.
STATUS_EVERY_S = 30.0
# How long policy changes are collected before a push: they come in bursts, and the datapath enforces them already.
POLICY_DELAY_S = 0.1
# How long the removal of a tenant netns waits for netdns to close its sockets there.
REMOVE_TIMEOUT_S = 1.0

_Key = tuple[str, ...]
# Contiv's names for counters (contiv 7.14).
_CONTIV_COUNTERS = {"found": "foundNameRecord", "absent": "noNameRecord", "invalid": "invalidQuery"}
# Changes of these affect the policy of endpoints, but not their records.
_POLICY_PREFIXES = TENANT_PREFIXES - {kinds.ENDPOINT.prefix, kinds.NETWORK.prefix}


class ZonePusher:
    """Keeps netdns in sync with the zones of this node's tenants. The store mirror feeds it.

    A tenant is added when its netns exists, and removed before its netns goes: an open socket would keep it alive.
    While netdns is unreachable nothing waits for it; when it is back it gets a full sync.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        socket: Path,
        dns_egress_denied: DnsEgressDenied = never_denied,
        domain: str = CLUSTER_DOMAIN,
    ) -> None:
        self._cluster = cluster
        self._socket = socket
        self._dns_egress_denied = dns_egress_denied
        self._domain = domain
        # Tenants with a netns on this node.
        self._active: set[TenantName] = set()
        # What the next push covers: whole zones, single objects, and zones whose policy has changed.
        self._dirty_tenants: set[TenantName] = set()
        self._dirty_objects: set[_Key] = set()
        self._dirty_policies: set[TenantName] = set()
        # Endpoints that are being attached here, until the store has them.
        self._pending: dict[EndpointKey, Endpoint] = {}
        # Endpoints that were pushed with egress to upstream DNS denied, and by which transports.
        self._denied: dict[EndpointKey, Transports] = {}
        # Kubernetes services, by owner, that were pushed to every tenant.
        self._shared: set[str] = set()
        self._changed = asyncio.Event()
        # Set for what must not wait for `POLICY_DELAY_S`.
        self._push_now = asyncio.Event()
        # A push computes zones and sends them as one step, so that no removal of a tenant comes in between.
        self._lock = asyncio.Lock()
        # Whether netdns answered last: a hung one delays the removal of a netns once, not every time.
        self._reachable = True
        # Whether netdns has everything up to the dirty objects.
        self.in_sync = False
        # The upstream resolvers of netdns, from its last report.
        self.upstreams: tuple[Address, ...] = ()
        # The last report of netdns: counters, and records that it could not take.
        self.report = Report()
        # By tenant and owner: entries that lack records, because the object makes invalid ones or too many.
        self._left_out: defaultdict[TenantName, dict[str, Entry]] = defaultdict(dict)

    def apply(self, change: Change) -> None:
        """Mark the objects of one revision as dirty."""
        for event in change.events:
            key = parse_store_key(event.key)
            if not isinstance(key, ObjectKey):
                continue
            if key.kind is kinds.SERVICE or (key.kind is kinds.ENDPOINT and self._differs_from_pushed(key.endpoint)):
                self._touch((key.kind.prefix, *key.parts))
            elif key.kind in (kinds.KUBE_SERVICE, kinds.KUBE_SLICE):
                self._touch((kinds.KUBE_SERVICE.prefix, *key.parts[:3]))
            elif key.kind is kinds.NETWORK and key.tenant in self._active:
                self._dirty_tenants.add(key.tenant)
                self._wake()
        for changed in self._cluster.cover_changed:
            folder, *parts = changed.split("/")
            self._touch((folder, *parts))

    def add_endpoint(self, endpoint: Endpoint) -> None:
        """An endpoint has its policy and is about to start: it may send queries before the store has it."""
        if self._cluster.get(kinds.ENDPOINT, *endpoint.key) is None:
            self._pending[endpoint.key] = endpoint
        self._touch((kinds.ENDPOINT.prefix, *endpoint.key))

    def remove_endpoint(self, key: EndpointKey) -> None:
        """An endpoint is being detached. One that the store has goes with the store's event."""
        if self._pending.pop(key, None) is not None:
            self._touch((kinds.ENDPOINT.prefix, *key))

    def _differs_from_pushed(self, key: EndpointKey) -> bool:
        """Whether the stored endpoint differs from what was pushed when it was attached."""
        pending, stored = self._pending.pop(key, None), self._cluster.get(kinds.ENDPOINT, *key)
        if pending is None or stored is None or stored.value != pending:
            return True
        return self._dns_egress_denied(pending) is not self._denied.get(key, Transports.NONE)

    def policy_changed(self, tenant: TenantName) -> None:
        """Check soon which endpoints of a tenant may query upstream resolvers."""
        self._dirty_policies.add(tenant)
        self._changed.set()

    def _touch(self, key: _Key) -> None:
        self._dirty_objects.add(key)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._push_now.set()

    def add_tenant(self, tenant: TenantName) -> None:
        """The tenant's netns exists. Repeated for a netns that was recreated: netdns opens its sockets again."""
        self._active.add(tenant)
        self._dirty_tenants.add(tenant)
        self._wake()

    async def remove_tenant(self, tenant: TenantName) -> None:
        """Return when netdns has left the tenant's netns, or has not answered in time.

        In the second case it leaves as soon as it answers, and later calls do not wait until it does.
        """
        self.discard_tenant(tenant)
        if not self._reachable:
            return
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S), self._lock:
                await send_once(self._socket, Tenant(tenant))
        except (Unavailable, TimeoutError) as error:
            self._reachable = False
            log.warning("removing tenant from netdns failed", tenant=tenant, reason=str(error) or "timeout")

    def discard_tenant(self, tenant: TenantName) -> None:
        """The tenant's netns is gone; the next push says so."""
        self._active.discard(tenant)
        self._dirty_tenants.add(tenant)
        self._wake()

    async def read_served_tenants(self) -> frozenset[TenantName]:
        """The tenants in whose netns netdns listens; none when it does not answer."""
        try:
            async with asyncio.timeout(REMOVE_TIMEOUT_S):
                return frozenset((await send_once(self._socket, StatusQuery())).serving)
        except (Unavailable, TimeoutError):
            return frozenset()

    async def run(self) -> None:
        """Push until cancelled. To be started when the node is restored: a full sync before would drop its tenants."""
        backoff = Backoff()
        logged = ""
        while True:
            try:
                async with connect_netdns(self._socket) as connection:
                    # Which endpoints may query upstream depends on the upstreams, so they are learned first.
                    await self._send(connection, StatusQuery())
                    await self._push(connection, everything=True)
                    backoff.reset()
                    logged = ""
                    self.in_sync = True
                    log.info("netdns in sync", tenants=len(self._active))
                    await self._push_changes(connection)
            except Unavailable as error:
                if error.message != logged:  # netdns may be down for long: one line is enough
                    log.warning("netdns out of sync", reason=error.message)
                logged = error.message
                self._reachable = self.in_sync = False
            # The full sync covers them.
            self._dirty_tenants.clear()
            self._dirty_objects.clear()
            self._dirty_policies.clear()
            await backoff.pause()

    async def _push_changes(self, connection: ControlConnection) -> None:
        while True:
            if await wait_event(self._changed, within=STATUS_EVERY_S):
                await wait_event(self._push_now, within=POLICY_DELAY_S)
                await self._push(connection, everything=False)
            else:
                await self._send(connection, StatusQuery())

    async def _push(self, connection: ControlConnection, *, everything: bool) -> None:
        async with self._lock:
            self._changed.clear()
            self._push_now.clear()
            tenants, self._dirty_tenants = self._dirty_tenants, set()
            objects, self._dirty_objects = self._dirty_objects | self._with_other_verdict(), set()
            self._dirty_policies.clear()
            if everything:
                # One message for each tenant: a large zone delays no other, and a frame has a limit.
                tenants = set(self._active)
                await self._send(connection, FullSync({}, pending=tuple(tenants)))
            for tenant in tenants:
                self._left_out.pop(tenant, None)
                zone = self._zone(tenant) if tenant in self._active else None
                self._note_left_out(tenant, zone.entries if zone else {})
                await self._send(connection, Tenant(tenant, zone))
            for message in self._changed_entries(objects, self._active - tenants):
                await self._send(connection, message)

    async def _send(self, connection: ControlConnection, message: Message) -> None:
        report = await connection.send(message)
        self._reachable = True
        if report.fault and report.fault != self.report.fault:
            log.warning("netdns left records out", records=report.rejected, reason=report.fault)
        self.report = report
        upstreams = tuple(_valid_addresses(report.upstreams))
        if upstreams != self.upstreams:
            # Other upstreams, other verdicts: every zone is pushed again.
            self.upstreams = upstreams
            self._dirty_tenants |= self._active
            self._wake()

    def _zone(self, tenant: TenantName) -> Zone:
        """The tenant's zone, with the endpoints that the store does not have yet."""
        services = self._cluster.all(kinds.KUBE_SERVICE)
        self._shared.update(
            kube_owner(service.namespace, service.name) for service in services if is_in_every_tenant(service)
        )
        zone = tenant_zone(self._cluster, tenant, dns_egress_denied=self._record_verdict, domain=self._domain)
        pending = dict(self._endpoint(*key) for key in self._pending if key.tenant == tenant)
        entries = zone.entries | {owner: entry for owner, entry in pending.items() if entry != EMPTY_ENTRY}
        return Zone(entries, zone.subnets)

    def _note_left_out(self, tenant: TenantName, entries: Mapping[str, Entry]) -> None:
        """Remember which of the entries lack records, and log it when that is new."""
        known = self._left_out[tenant]
        for owner, entry in entries.items():
            old = known.pop(owner, EMPTY_ENTRY)
            if not entry.left_out:
                continue
            known[owner] = entry
            if entry.fault != old.fault:
                log.warning(
                    "DNS records left out", tenant=tenant, object=owner, records=entry.left_out, reason=entry.fault
                )

    @property
    def records_left_out(self) -> int:
        """Records that are not served, because they are invalid or too many: left out here, or rejected by netdns."""
        own = (entry.left_out for known in self._left_out.values() for entry in known.values())
        return sum(own) + self.report.rejected

    def _record_verdict(self, endpoint: Endpoint) -> Transports:
        """By which transports DNS egress of an endpoint is denied; recorded, as it is about to be pushed."""
        self._denied.pop(endpoint.key, None)
        if denied := self._dns_egress_denied(endpoint):
            self._denied[endpoint.key] = denied
        return denied

    def _with_other_verdict(self) -> set[_Key]:
        """The endpoints whose DNS egress verdict differs from the one that was pushed."""
        return {
            (kinds.ENDPOINT.prefix, *endpoint.key)
            for tenant in self._dirty_policies & self._active
            for endpoint in self._cluster.all(kinds.ENDPOINT, tenant)
            if endpoint.key not in self._cluster.uncovered
            and self._dns_egress_denied(endpoint) is not self._denied.get(endpoint.key, Transports.NONE)
        }

    def _changed_entries(self, objects: set[_Key], tenants: set[TenantName]) -> list[Entries]:
        """The present entries of the objects, by tenant."""
        found: defaultdict[TenantName, dict[str, Entry]] = defaultdict(dict)
        for folder, name, *rest in objects:
            tenant = TenantName(name)
            if folder == kinds.KUBE_SERVICE.prefix:
                for receiver, owner, entry in self._kube_service(tenant, *rest):
                    if receiver in tenants:
                        found[receiver][owner] = entry
            elif tenant in tenants:
                entry_of = self._service if folder == kinds.SERVICE.prefix else self._endpoint
                owner, entry = entry_of(tenant, *rest)
                found[tenant][owner] = entry
        for tenant, entries in found.items():
            self._note_left_out(tenant, entries)
        return [
            Entries(
                tenant,
                put={owner: entry for owner, entry in entries.items() if entry != EMPTY_ENTRY},
                drop=tuple(owner for owner, entry in entries.items() if entry == EMPTY_ENTRY),
            )
            for tenant, entries in found.items()
        ]

    def _service(self, tenant: TenantName, name: str) -> tuple[str, Entry]:
        stored = self._cluster.get(kinds.SERVICE, tenant, name)
        return service_owner(name), service_entry(stored.value, domain=self._domain) if stored else EMPTY_ENTRY

    def _kube_service(self, tenant: TenantName, namespace: str, name: str) -> Iterator[tuple[TenantName, str, Entry]]:
        """The entry of a Kubernetes service for its own tenant, and for all tenants if it is or was shared."""
        owner = kube_owner(namespace, name)
        entry, is_shared = stored_kube_entry(self._cluster, tenant, namespace, name, domain=self._domain)
        yield tenant, owner, entry
        if is_shared or owner in self._shared:
            (self._shared.add if is_shared else self._shared.discard)(owner)
            for other in self._active - {tenant}:
                yield other, owner, entry if is_shared else EMPTY_ENTRY

    def _endpoint(self, tenant: TenantName, network: str, endpoint: str) -> tuple[str, Entry]:
        key = EndpointKey(tenant, NetworkName(network), EndpointId(endpoint))
        known = self._cluster.covered_endpoint(key) or self._pending.get(key)
        if known is None:
            self._denied.pop(key, None)
            return endpoint_owner(network, endpoint), EMPTY_ENTRY
        entry = workload_entry(known, dns_egress_denied=self._record_verdict, domain=self._domain)
        return endpoint_owner(network, endpoint), entry

    async def inspect(self) -> dict[str, Any]:
        """`/inspect/nameserver` (contiv 6.7). `Unavailable` while netdns cannot be reached."""
        report = await send_once(self._socket, StatusQuery())
        zones = {tenant: self._zone(tenant) for tenant in self._active}
        services = sum(key[0] == kinds.SERVICE.prefix for key in self._dirty_objects)
        return {
            "serviceQueue": services,
            "endpointQueue": len(self._dirty_objects) - services,
            "dnsRecords": inspect_records(zones),
            "leftOut": {
                tenant: {owner: {"records": entry.left_out, "reason": entry.fault} for owner, entry in known.items()}
                for tenant, known in self._left_out.items()
                if known
            },
            "serving": list(report.serving),
            "stats": {_CONTIV_COUNTERS.get(name, name): count for name, count in report.statistics.items()},
        }


def _valid_addresses(texts: Iterable[str]) -> Iterator[Address]:
    for text in texts:
        try:
            yield parse_address(text, field="upstream")
        except Invalid:
            continue  # policy cannot be evaluated for it: it does not count as reachable


class DnsPublisher:
    """A subscriber of the store mirror, behind cluster and policy, and a `NetnsObserver`."""

    def __init__(
        self,
        *,
        socket: Path,
        cluster: Cluster,
        node: NodeName,
        policies: Mapping[TenantName, TenantPolicy],
        domain: str = CLUSTER_DOMAIN,
    ) -> None:
        self._node = node
        self._policies = policies
        self._pusher = ZonePusher(cluster, socket=socket, dns_egress_denied=self._dns_egress_denied, domain=domain)
        # Tenants in whose netns netdns listens; None until a status query has shown what an earlier agent left behind.
        self._tenants: frozenset[TenantName] | None = None
        # A new listing invalidates every zone. They are pushed when the policy that follows from it is computed.
        self._replaced = False

    @property
    def in_sync(self) -> bool:
        """Whether netdns is connected and has all zones."""
        return self._pusher.in_sync

    @property
    def records_left_out(self) -> int:
        """Records that are not served, because they are invalid or too many."""
        return self._pusher.records_left_out

    @property
    def statistics(self) -> Mapping[str, int]:
        """The counters of netdns, from its last report."""
        return self._pusher.report.statistics

    async def run(self) -> None:
        """Push to netdns until cancelled. To be started when the node is restored."""
        await self._pusher.run()

    async def inspect(self) -> dict[str, Any]:
        """`/inspect/nameserver` (contiv 6.7). `Unavailable` while netdns cannot be reached."""
        return await self._pusher.inspect()

    def replace(self, _: Listing) -> None:
        self._replaced = True

    def apply(self, change: Change) -> None:
        self._pusher.apply(change)
        for event in change.events:
            folder, _, rest = event.key.partition("/")
            if folder in _POLICY_PREFIXES:
                self._pusher.policy_changed(TenantName(rest.partition("/")[0]))
            elif folder in SHARED_PREFIXES:
                for tenant in self._tenants or ():
                    self._pusher.policy_changed(tenant)

    async def leave_all_but(self, tenants: Set[TenantName]) -> None:
        if self._tenants is None:
            self._tenants = await self._pusher.read_served_tenants()
        removed, self._tenants = self._tenants - tenants, self._tenants & tenants
        for tenant in removed:
            await self._pusher.remove_tenant(tenant)

    def enter(self, tenants: Set[TenantName], *, recreated: bool = False) -> None:
        known = self._tenants or frozenset()
        for tenant in known - tenants:
            # Its last endpoint was detached while `leave_all_but` waited for netdns.
            self._pusher.discard_tenant(tenant)
        push_all = recreated or self._replaced
        for tenant in tenants if push_all else tenants - known:
            self._pusher.add_tenant(tenant)
        self._tenants, self._replaced = frozenset(tenants), False

    def policy_changed(self, tenant: TenantName) -> None:
        self._pusher.policy_changed(tenant)

    def add_endpoint(self, endpoint: Endpoint) -> None:
        self._pusher.add_endpoint(endpoint)

    def remove_endpoint(self, endpoint: Endpoint) -> None:
        self._pusher.remove_endpoint(endpoint.key)

    def _dns_egress_denied(self, endpoint: Endpoint) -> Transports:
        policy = self._policies.get(endpoint.tenant)
        if policy is None:  # until the policy is known, endpoints of this node query no upstream: fail closed
            return Transports.BOTH if endpoint.host == self._node else Transports.NONE
        return policy.dns_egress_denied(endpoint, self._pusher.upstreams)
