"""Keeps the datapath as the cluster says: events only say *look again*, the difference of two sets says what to do."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

from weft.agent.dataplane.executor import DatapathExecutor
from weft.agent.dataplane.features import NOTHING, DatapathFeature, joined
from weft.agent.dataplane.host_access import HostAccess
from weft.agent.dataplane.netns_lifecycle import NetnsObserver, NoObserver
from weft.agent.dataplane.policy import Policies
from weft.agent.dataplane.qos import Profiles
from weft.agent.dataplane.services import Services
from weft.agent.store.attachment_store import WIRED, AttachmentStore, Stage
from weft.domain import kinds, model
from weft.domain.cluster import Cluster
from weft.domain.desired.diff import Difference, diff
from weft.domain.desired.segments import is_bridged, tags_of
from weft.domain.desired.state import (
    Beyond,
    Port,
    StateItem,
    TenantNetns,
    ground_of,
    node_view,
    rank,
    remotes_of,
    way_of,
)
from weft.domain.errors import DatapathFault
from weft.domain.ids import NodeName, TenantName
from weft.domain.store_types import NEVER, Change, Listing, Revision
from weft.ports.datapath import DriftReport
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.logs import Log
from weft.runtime.memory_trim import give_back_memory

log = Log("reconcile")

# How often everything is read back, for drift that nobody announced.
FULL_ROUND_S = 60.0
# What the whole node view depends on.
_GROUND = {kinds.NETWORK.prefix, kinds.NODE.prefix, kinds.BLOCKS, kinds.GLOBAL.prefix}


class Reconciler:
    """The sink of the agent's mirror, and the one who tells the datapath. Ports come and go by attachments.

    The kernel's thread does things in the order in which it is told: whoever takes a difference hands it over before
    anything else can happen.
    """

    def __init__(self, cluster: Cluster, *, node: NodeName, journal: AttachmentStore, kernel: DatapathExecutor) -> None:
        self._cluster = cluster
        self._node = node
        self._journal = journal
        self._kernel = kernel
        self._applied: frozenset[StateItem] = frozenset()
        self._tenants: frozenset[TenantName] = frozenset()
        self._of_endpoint: defaultdict[tuple[str, ...], frozenset[Beyond]] = defaultdict(frozenset)
        self.policies = Policies(cluster, node=node, journal=journal)
        self.services = Services(cluster, node=node, journal=journal)
        self._topics: tuple[DatapathFeature, ...] = (
            self.policies,
            self.services,
            Profiles(cluster, journal),
            HostAccess(cluster, node=node, journal=journal),
        )
        # Who else is inside tenants' spaces.
        self.spaces: NetnsObserver = NoObserver()
        self._handed_out = False
        self._doubtful = False
        self._touched: set[tuple[str, ...]] = set()
        self._all_touched = True
        self._news = asyncio.Event()
        # Set when the datapath may follow again that did not.
        self._urged = asyncio.Event()
        self._turn = asyncio.Lock()
        self._seen: Revision = NEVER
        # The revision of the store up to which the kernel is as it should be.
        self.realised: Revision = NEVER
        # The last wish for a receipt that came by the news; it and all before it are carried out.
        self.settled: Revision = NEVER
        # Set when some network is another than before.
        self.networks_changed = asyncio.Event()
        # The ports of attached workloads that a look at everything has not found, and that may be had again.
        self.missing: set[Port] = set()
        self._given_up: set[Port] = set()
        # Set when some are missing.
        self.port_lost = asyncio.Event()
        # Set when a wish for a receipt has been carried out.
        self.receipt_due = asyncio.Event()
        # How many deviations of the kernel were put right so far.
        self.repaired = 0
        # Why the datapath does not follow; empty while it does.
        self.fault = ""

    @property
    def lag(self) -> int:
        """How many revisions of the store are known here and not carried out yet."""
        return max(self._seen - self.realised, 0)

    @property
    def is_current(self) -> bool:
        """Whether all that was heard is carried out; what was told in vain is not."""
        return not (self.lag or self._touched or self._all_touched)

    def replace(self, listing: Listing) -> None:
        self._cluster.replace(listing)
        self._seen = listing.revision
        for topic in self._topics:
            topic.replace()
        self.networks_changed.set()
        self.resync()

    def apply(self, change: Change) -> None:
        self._cluster.apply(change)
        open_before = self.services.open_tenants
        self._seen = max(self._seen, change.revision)  # our own commits come before the watch tells of older ones
        for event in change.events:
            for topic in self._topics:
                topic.follow(event.key)
            folder, *parts = event.key.split("/")
            if folder == kinds.ENDPOINT.prefix:
                self._touched.add(tuple(parts))
            elif folder in _GROUND or (folder == kinds.SERVICE.prefix and is_bridged(self._cluster)):
                self._all_touched = True
            elif folder == kinds.GROUP.prefix:
                group = self._cluster.get(kinds.GROUP, *parts)
                self._all_touched |= group is None or group.value.pkt_tag > 0  # it may have had a tag of its own
            if folder == kinds.NETWORK.prefix:
                self.networks_changed.set()
        self._all_touched |= self.services.open_tenants != open_before
        self._news.set()

    def resync(self) -> None:
        """More may have changed than the news told."""
        self._all_touched = True
        self._news.set()

    async def run(self) -> None:
        """Follow the cluster for ever; read everything back now and then."""
        backoff = Backoff(cap=10.0)
        clock = asyncio.get_running_loop().time
        full_at = clock() + FULL_ROUND_S
        while True:
            await wait_event(self._news, within=max(full_at - clock(), 0.01))
            try:
                if not self._doubtful:
                    await self.refresh()  # so that a round reads back what was told, and takes no news for drift
                if self._doubtful or clock() >= full_at:
                    await self.converge()
                    full_at = clock() + FULL_ROUND_S
                backoff.reset()
            except DatapathFault as error:
                self.fault = error.message
                log.error("datapath fault", reason=error.message)
                self.mark_dirty()
                self._urged.clear()
                await backoff.pause(until=self._urged)

    def mark_dirty(self) -> None:
        """The datapath may not be as it was told: everything is to be read back soon."""
        self._doubtful = True
        self._news.set()
        self._urged.set()

    async def refresh(self) -> None:
        """Bring the datapath up to what the cluster says now, as far as it was touched."""
        async with self._turn, self._applying():
            self._news.clear()
            touched, self._touched = self._touched, set()
            if self._all_touched or any(self._is_new_ground(key) for key in touched):
                self._all_touched = False
                await self._apply_all(self._wanted())
                return
            changed = {key: self._remotes_at(key) for key in touched}
            removed = {part for key in changed for part in self._of_endpoint[key]}
            added = {part for parts in changed.values() for part in parts}
            is_so = removed <= added <= self._applied
            await self._apply(self._applied if is_so else (self._applied - removed) | added)
            self._of_endpoint.update(changed)

    async def converge(self) -> DriftReport:
        """Read everything back and mend it."""
        async with self._turn, self._applying():
            findings = await self._read_back()
        await self._kernel.call(lambda _: give_back_memory())  # to have everything twice took some
        return findings

    async def _read_back(self) -> DriftReport:
        await self.spaces.leave(but=self._local_tenants())
        self._news.clear()
        self._touched.clear()
        self._all_touched = False
        wanted = self._wanted()
        self._applied, self._tenants = wanted, _tenants(wanted)
        attached = {note.wiring.port for note in self._journal if note.wiring and note.stage is Stage.ATTACHED}
        everything = {*wanted, *self._ports()}.union(*(topic.everything(self._tenants) for topic in self._topics))
        self._doubtful = False
        try:
            findings = await self._kernel.call(lambda datapath: datapath.converge(everything))
        except BaseException:
            self._doubtful = True
            raise
        self.spaces.enter(self._tenants, anew=bool(findings.repaired))
        self._remember_remotes()
        self.repaired += len(findings.repaired)
        self._note_missing(attached & findings.missing)
        for text in findings.repaired:
            log.info("mended", what=text)
        return findings

    def _note_missing(self, lost: set[Port]) -> None:
        self._given_up &= lost  # who is back may be lost again
        self.missing = lost - self._given_up
        if self.missing:
            self.port_lost.set()

    def found(self, port: Port) -> None:
        """A workload is wired, whether it was missing or not."""
        self.missing.discard(port)

    def forget(self, port: Port) -> None:
        """A workload has left, whether it was missing or not."""
        self.missing.discard(port)
        self._given_up.discard(port)

    def abandon_port(self, port: Port) -> None:
        """What is missing cannot be had again; it is not missed until it was there once more."""
        self.missing.discard(port)
        self._given_up.add(port)

    @asynccontextmanager
    async def _applying(self) -> AsyncIterator[None]:
        """What is known when the block begins is carried out when it ends well."""
        seen, wish = self._seen, self._cluster.receipt_wish
        yield
        is_awaited = wish != self.settled
        if is_awaited:
            await self._kernel.call(lambda datapath: datapath.settle())
        self.realised = seen
        self.fault = ""
        if is_awaited:
            self.settled = wish
            self.receipt_due.set()

    async def ensure_network(self, network: model.Network, group: str) -> None:
        """The tenant's space and the ground of network and group are there when this returns, and stay: it is noted.

        The turn is waited for even when there is nothing to do: a round that began before the note may be removing
        the space of a tenant whose last workload has just left.
        """
        needed = frozenset(ground_of(self._cluster, network, group))
        async with self._turn:
            if self._doubtful:
                await self._read_back()
            if not self._applied.issuperset(needed):
                await self._apply_all(self._wanted().union(needed))

    def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What the datapath is to be told with the port of a workload for which there is room."""
        self._handed_out = True
        difference = joined(topic.add_endpoint(endpoint) for topic in self._topics)
        self.spaces.add_endpoint(endpoint)
        return difference

    def dismiss(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """What the datapath is to be told when a workload's port goes."""
        self._handed_out = True
        self.spaces.dismiss(endpoint)
        return joined(topic.dismiss(endpoint) for topic in self._topics)

    def _wanted(self) -> frozenset[StateItem]:
        return node_view(self._cluster, self._node, self._local_tenants())

    def _local_tenants(self) -> frozenset[TenantName]:
        """Those with workloads here, and those whose services are asked at every node."""
        return frozenset(note.endpoint.tenant for note in self._journal) | self.services.open_tenants

    def _ports(self) -> frozenset[Port]:
        """Those of workloads that are wired, or are just being wired."""
        return frozenset(note.wiring.port for note in self._journal if note.wiring is not None and note.stage in WIRED)

    def _is_new_ground(self, key: tuple[str, ...]) -> bool:
        """Whether an endpoint is in a network of a local tenant for which there is no way to other nodes yet."""
        tenant, network, _ = key
        stored, endpoint = self._cluster.get(kinds.NETWORK, tenant, network), self._cluster.get(kinds.ENDPOINT, *key)
        if stored is None or TenantNetns(TenantName(tenant)) not in self._applied:
            return False
        tags = tags_of(self._cluster, stored.value, endpoint.value.group if endpoint else "")
        return tags is not None and way_of(TenantName(tenant), tags) not in self._applied

    def _remotes_at(self, key: tuple[str, ...]) -> frozenset[Beyond]:
        stored = self._cluster.get(kinds.ENDPOINT, *key)
        if stored is None or TenantNetns(stored.value.tenant) not in self._applied:
            return frozenset()
        return frozenset(remotes_of(self._cluster, self._node, stored.value))

    async def _apply(self, wanted: frozenset[StateItem]) -> None:
        view = NOTHING
        if wanted is not self._applied:
            view = diff(wanted, self._applied, rank=rank)
            self._tenants = _tenants(wanted)
        difference = joined([view, *(topic.refresh(self._tenants) for topic in self._topics)])
        is_awaited = self._handed_out and self._cluster.receipt_wish != self.settled
        if difference or is_awaited:
            self._handed_out = False  # what was handed out before is carried out before
            await self._kernel.call(lambda datapath: datapath.apply(difference))
        self._applied = wanted

    async def _apply_all(self, wanted: frozenset[StateItem]) -> None:
        await self.spaces.leave(but=_tenants(wanted))
        await self._apply(wanted)
        self.spaces.enter(self._tenants)
        self._remember_remotes()

    def _remember_remotes(self) -> None:
        self._of_endpoint = defaultdict(frozenset, self._all_remotes())

    def _all_remotes(self) -> Iterator[tuple[tuple[str, ...], frozenset[Beyond]]]:
        tenants = {part.tenant for part in self._applied if isinstance(part, TenantNetns)}
        for tenant in tenants:
            for endpoint in self._cluster.all(kinds.ENDPOINT, tenant):
                if endpoint.host != self._node:
                    yield tuple(endpoint.key), frozenset(remotes_of(self._cluster, self._node, endpoint))


def _tenants(parts: Iterable[StateItem]) -> frozenset[TenantName]:
    """The tenants that have a space among these parts."""
    return frozenset(part.tenant for part in parts if isinstance(part, TenantNetns))
