"""The apply loop: brings the datapath to the desired state, and reads it back to repair drift."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence, Set
from contextlib import asynccontextmanager
from typing import Protocol

from weft.agent.dataplane.desired_state import DesiredState, Update, tenants_of
from weft.agent.dataplane.executor import DatapathExecutor
from weft.domain import model
from weft.domain.desired.diff import Difference
from weft.domain.desired.state import Port, StateItem
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.domain.store_types import NEVER, Revision
from weft.ports.datapath import DriftReport
from weft.runtime.backoff import Backoff, wait_event
from weft.runtime.logs import Log
from weft.runtime.memory_trim import trim_memory

log = Log("reconcile")

# How often everything is read back, for drift that no kernel or OVS notification announced.
FULL_SYNC_INTERVAL_S = 60.0


class NetnsObserver(Protocol):
    """Has sockets of its own in tenant netns: it enters new ones, and leaves them before they are removed."""

    async def leave_all_but(self, tenants: Set[TenantName]) -> None:
        """The netns of all other tenants are about to be removed. Must be quick, and must not raise."""
        ...

    def enter(self, tenants: Set[TenantName], *, recreated: bool = False) -> None:
        """Exactly these tenants have a netns now. `recreated`: some may have a new one under the same name."""
        ...

    def policy_changed(self, tenant: TenantName) -> None:
        """The policy engine of a tenant took up a change later than the cluster."""
        ...

    def add_endpoint(self, endpoint: model.Endpoint) -> None:
        """The policy of an endpoint of this node is computed. The store may not have the endpoint yet."""
        ...

    def remove_endpoint(self, endpoint: model.Endpoint) -> None:
        """An endpoint of this node is being detached. The store may never have had it."""
        ...


class MissingPorts:
    """The ports that the last full read-back has not found, and that may still be restored.

    Another program has removed them under an attached endpoint.
    """

    def __init__(self) -> None:
        self._missing: set[Port] = set()
        # Ports that cannot be restored, such as those of a namespace that is gone. DEL and GC clean them up.
        self._abandoned: set[Port] = set()
        # Set when some ports are missing.
        self.detected = asyncio.Event()

    def __contains__(self, port: Port) -> bool:
        return port in self._missing

    def __iter__(self) -> Iterator[Port]:
        return iter(self._missing)

    def __len__(self) -> int:
        return len(self._missing)

    def update(self, missing: Set[Port]) -> None:
        """Take over the result of a full read-back."""
        # An abandoned port that is back may get lost again, and is then worth another try.
        self._abandoned &= missing
        self._missing = set(missing) - self._abandoned
        if self._missing:
            self.detected.set()

    def port_restored(self, port: Port) -> None:
        """The port is plugged, whether it was missing or not."""
        self._missing.discard(port)

    def port_removed(self, port: Port) -> None:
        """The endpoint is detached, whether its port was missing or not."""
        self._missing.discard(port)
        self._abandoned.discard(port)

    def abandon_port(self, port: Port) -> None:
        """The port cannot be restored: ignore it until a read-back has seen it again."""
        self._missing.discard(port)
        self._abandoned.add(port)


class Reconciler:
    """Applies the desired state. Ports come and go with attachments, which plug and unplug them.

    The datapath thread works in the order of its calls, and differences build on each other. So a caller of
    `add_endpoint` or `remove_endpoint` hands the difference over before it awaits anything else.
    """

    def __init__(
        self, desired: DesiredState, *, executor: DatapathExecutor, netns_observers: Sequence[NetnsObserver] = ()
    ) -> None:
        self._desired = desired
        self._executor = executor
        self._netns_observers = netns_observers
        for observer in netns_observers:
            desired.on_late_policy(observer.policy_changed)
        # One round at a time: two would take differences against the same applied state.
        self._lock = asyncio.Lock()
        # Whether the datapath may differ from what was applied.
        self._dirty = False
        # Whether attachments took differences that may still wait for the datapath thread.
        self._plugs_pending = False
        # Set when a datapath that failed may work again: the retry need not wait for the backoff.
        self._retry_now = asyncio.Event()
        # The ports of attached endpoints that the last full read-back has not found.
        self.missing = MissingPorts()
        # The store revision up to which the datapath is as desired.
        self.applied_revision: Revision = NEVER
        # The newest sync request that is carried out, with all before it.
        self.acked_revision: Revision = NEVER
        # Set when a sync request has been carried out.
        self.sync_ack_due = asyncio.Event()
        # How many differences between kernel and desired state were repaired since the start.
        self.repaired = 0
        # Why the datapath is out of sync; empty while it is in sync.
        self.fault = ""

    @property
    def lag(self) -> int:
        """How many store revisions were received and are not applied yet."""
        return max(self._desired.revision - self.applied_revision, 0)

    @property
    def is_current(self) -> bool:
        """Whether everything received is applied. A round that failed has applied nothing."""
        return not (self.lag or self._desired.is_stale)

    async def run(self) -> None:
        """Apply changes as they come, and read everything back once per `FULL_SYNC_INTERVAL_S`."""
        backoff = Backoff(cap=10.0)
        clock = asyncio.get_running_loop().time
        full_at = clock() + FULL_SYNC_INTERVAL_S
        while True:
            await wait_event(self._desired.changed, within=max(full_at - clock(), 0.01))
            try:
                if not self._dirty:
                    # Before the read-back: a change that is not applied yet would be taken for drift.
                    await self.refresh()
                if self._dirty or clock() >= full_at:
                    await self.converge()
                    full_at = clock() + FULL_SYNC_INTERVAL_S
                backoff.reset()
            except DatapathFault as error:
                self.fault = error.message
                log.error("datapath fault", reason=error.message)
                self.mark_dirty()
                self._retry_now.clear()
                await backoff.pause(until=self._retry_now)

    def mark_dirty(self) -> None:
        """The datapath may differ from what was applied: read everything back soon."""
        self._dirty = True
        self._desired.changed.set()
        self._retry_now.set()

    def resync(self) -> None:
        """Compute the whole desired state again: more may have changed than the store events say."""
        self._desired.mark_stale()

    async def refresh(self) -> None:
        """Apply what has changed since the last round."""
        known = self._known()
        # Before the lock: ADDs of other tenants go on while a policy is computed.
        await self._desired.compute_policies()
        async with self._lock, self._applying(known):
            await self._apply(self._desired.take_update())

    async def converge(self) -> DriftReport:
        """Read everything back and repair drift."""
        known = self._known()
        await self._desired.compute_policies()
        async with self._lock, self._applying(known):
            report = await self._read_back()
        # The state was in memory twice, read and desired: malloc keeps the freed memory until it is trimmed.
        await self._executor.call(lambda _: trim_memory())
        return report

    async def ensure_network(self, network: model.Network, group: str) -> None:
        """Return when the datapath has the tenant's netns and the segment of network and group.

        They stay for as long as the attachment is in the attachment store, so the caller records it first.
        """
        await self._desired.compute_policies({network.tenant})
        needed = self._desired.network_items(network, group)
        # The lock is taken even if nothing is missing: a round that began before the attachment was recorded may be
        # removing the netns of a tenant whose last endpoint has just been detached.
        async with self._lock:
            if self._dirty:
                await self._read_back()
            if not self._desired.is_applied(needed):
                await self._apply(self._desired.full_update(needed))

    async def add_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """The policy, service, QoS and host entries to put with the endpoint's port. Its network must be there.

        Returns when the policy of the endpoint is computed.
        """
        difference = await self._desired.add_endpoint(endpoint)
        self._plugs_pending = True
        for observer in self._netns_observers:
            observer.add_endpoint(endpoint)
        return difference

    async def remove_endpoint(self, endpoint: model.Endpoint) -> Difference[StateItem]:
        """The entries to put and drop when the endpoint's port is removed, when its policy is computed."""
        for observer in self._netns_observers:
            observer.remove_endpoint(endpoint)
        difference = await self._desired.remove_endpoint(endpoint)
        self._plugs_pending = True
        return difference

    def _known(self) -> tuple[Revision, Revision]:
        """The newest revision and sync request that were received."""
        return self._desired.revision, self._desired.sync_request

    @asynccontextmanager
    async def _applying(self, known: tuple[Revision, Revision]) -> AsyncIterator[None]:
        """What was known before the policies were computed is applied when the block ends without an error."""
        revision, sync_request = known
        yield
        is_awaited = sync_request != self.acked_revision
        if is_awaited:
            # Connections may still use cached verdicts: the acknowledgement says that none does.
            await self._executor.call(lambda datapath: datapath.flush_datapath_cache())
        self.applied_revision = revision
        self.fault = ""
        if is_awaited:
            self.acked_revision = sync_request
            self.sync_ack_due.set()

    async def _apply(self, update: Update) -> None:
        if update.remotes is None:
            await self._leave_netns(tenants_of(update.items))
        difference = self._desired.take_difference(update)
        # An empty difference is a barrier: it returns when the plugs that were posted before it are done.
        is_awaited = self._plugs_pending and self._desired.sync_request != self.acked_revision
        if difference or is_awaited:
            self._plugs_pending = False
            await self._executor.call(lambda datapath: datapath.apply(difference))
        self._desired.note_applied(update)
        if update.remotes is None:
            self._enter_netns()

    async def _read_back(self) -> DriftReport:
        await self._leave_netns(self._desired.local_tenants())
        async with self._desired.policies_idle():
            update, everything = self._desired.take_everything()
            attached, keep_unknown = self._desired.attached_ports(), self._desired.has_unknown_ports
            # Cleared before the call: what others change while it runs needs another read-back.
            self._dirty = False
            try:
                report = await self._executor.call(
                    lambda datapath: datapath.converge(everything, keep_unknown=keep_unknown)
                )
            except BaseException:
                self._dirty = True
                raise
        self._enter_netns(recreated=bool(report.repaired))
        self._desired.note_applied(update)
        self.repaired += len(report.repaired)
        self.missing.update(attached & report.missing)
        for text in report.repaired:
            log.info("drift repaired", what=text)
        return report

    async def _leave_netns(self, remaining: Set[TenantName]) -> None:
        # A socket inside keeps a network namespace alive, so observers leave before it is removed.
        for observer in self._netns_observers:
            await observer.leave_all_but(remaining)

    def _enter_netns(self, *, recreated: bool = False) -> None:
        for observer in self._netns_observers:
            observer.enter(self._desired.tenants, recreated=recreated)
