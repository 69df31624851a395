"""Sync flows and meters of the integration bridge with desired state, and read them back.

Meters are added before the flows that use them, and deleted after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

from weft.adapters.netns.drop_reasons import DROP_REASONS
from weft.adapters.ovs.openflow.actions import SetField
from weft.adapters.ovs.openflow.client import OpenFlow, ZonedAddress
from weft.adapters.ovs.openflow.flows import Flow, FlowKey
from weft.adapters.ovs.openflow.meters import Meter
from weft.adapters.ovs.pipeline.conntrack_flush import StaleConntrack, TenantAddress
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.flood_groups import FloodGroups
from weft.adapters.ovs.pipeline.pipeline import base_flows, flows_of
from weft.adapters.ovs.pipeline.qos import meters_of
from weft.adapters.ovs.pipeline.tables import TENANT, VERDICT, Table
from weft.domain.desired.state import Port, QosProfile, StateItem
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.ports.datapath import VerdictCounters


class FlowTable:
    """The flows of the integration bridge. It remembers the flows of each state item.

    They depend on port numbers and tenant IDs, which may be gone when the item is removed.
    """

    def __init__(self, openflow: OpenFlow) -> None:
        self._openflow = openflow
        self._flows: dict[StateItem, tuple[Flow, ...]] = {}
        self._flood_groups = FloodGroups()
        # Keys of all flows that OVS should have.
        self._expected: set[FlowKey] = set()
        # By interface: a profile is removed with its port.
        self._qos: dict[str, QosProfile] = {}
        self._stale_conntrack = StaleConntrack()
        # Whether OVS may lack something: a change failed, or desired state is newer than what was applied. While set,
        # the flows must not be replayed to a restarted ovs-vswitchd: they may allow what policy denies by now.
        self._is_stale = False
        self._has_standby = False

    def note_desired(self, desired: Set[StateItem]) -> None:
        """Mark the applied flows as stale if they are not those of `desired`, which `converge` is about to apply."""
        if self._flows.keys() != desired:
            self._is_stale = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Mark the flows as stale during a change. They stay so when it fails, until `converge` succeeds."""
        was_stale, self._is_stale = self._is_stale, True
        yield
        self._is_stale, self._has_standby = was_stale, False

    def converge(self, desired: Set[StateItem], context: FlowContext) -> list[str]:
        """Read all flows back, and make them those of `desired` in one bundle; a log of the changes."""
        before = self.items  # still the old items after `_sync`, which replaces the dict
        flows = {counted.flow for counted in self._openflow.read_flows()}
        repaired = self._sync(desired, context, flows, {*self._openflow.read_meters()})
        stale = self._stale_conntrack.update(drop=before - desired, put=desired - before)
        self._openflow.flush_connections(_zoned(stale, context))
        self._stale_conntrack.mark_flushed(stale)
        return repaired

    def refill(self, desired: Set[StateItem], context: FlowContext) -> list[str]:
        """Install the flows of `desired` into a bridge known to have none; skips reading them back, to save time."""
        return self._sync(desired, context, set(), set())

    def poll(self, *, in_sync: bool) -> list[str]:
        """Process pending messages, as `Connection.poll`. Replay the flows to an ovs-vswitchd that has restarted.

        Without flows it drops all packets, so they are prepared while it is down and sent with the handshake. That is
        safe only if no newer desired state is known (`in_sync`). Returns a log of what was done.
        """
        before = self._openflow.connect_count
        try:
            self._openflow.poll_and_replay(replay=in_sync and not self._is_stale)
        except DatapathFault:
            self._prepare_standby()
            raise
        if self._openflow.connect_count == before:
            return []
        self._has_standby = False
        return (
            [f"replayed {len(self._expected)} flows to the restarted ovs-vswitchd"]
            if self._openflow.is_refilled
            else []
        )

    def _prepare_standby(self) -> None:
        if not self._has_standby and not self._is_stale:
            self._openflow.prepare_replay([*self._all_flows()])
            self._has_standby = True

    def _all_flows(self) -> Iterator[Flow]:
        if self._expected:
            yield from base_flows()
        yield from self._flood_groups.flows
        yield from (flow for flows in self._flows.values() for flow in flows)

    def _sync(
        self, desired: Set[StateItem], context: FlowContext, actual: Set[Flow], actual_meters: Set[Meter]
    ) -> list[str]:
        """Change the actual flows and meters to those of `desired`."""
        self._is_stale = True
        by_item = {item: flows_of(item, context) for item in desired}
        flood_groups = FloodGroups()
        _, flooded = flood_groups.update(drop=(), put=desired, context=context)
        flows = {*base_flows(), *flooded, *(flow for some in by_item.values() for flow in some)}
        keys = {flow.key for flow in flows}
        meters = {meter for item in desired for meter in meters_of(item, context)}
        unused_meters = {meter.number for meter in actual_meters} - {meter.number for meter in meters}
        # OVS rejects a flow with an unknown meter, and deletes the flows of a meter that is deleted.
        self._openflow.put_meters(meters - actual_meters)
        missing = flows - actual
        extra = {flow.key: flow for flow in actual if flow.key not in keys}
        self._openflow.change(drop=extra, put=missing)
        self._openflow.drop_meters(unused_meters)
        self._flows, self._flood_groups, self._expected = by_item, flood_groups, keys
        self._qos = {item.interface: item for item in desired if isinstance(item, QosProfile)}
        self._is_stale = self._has_standby = False
        return [
            *(f"put meter {meter}" for meter in meters - actual_meters),
            *(f"put flow {flow}" for flow in missing),
            *(f"removed flow {flow}" for flow in extra.values()),
            *(f"removed meter {number}" for number in unused_meters),
        ]

    def apply(
        self,
        *,
        drop: Iterable[StateItem],
        put: Iterable[StateItem],
        context: FlowContext,
        flush: Set[TenantAddress] = frozenset(),
    ) -> None:
        """Remove and add the flows of state items in one bundle.

        A QoS profile goes with its port. Then flush conntrack entries of addresses that have a new owner, and those of
        `flush`. The flows have changed by then, so the old connections cannot be committed again.
        """
        drop, put = tuple(drop), tuple(put)
        stale = flush | self._stale_conntrack.update(drop=drop, put=put)
        profiles = [self._qos.get(item.interface) for item in drop if isinstance(item, Port)]
        drop += tuple(profile for profile in profiles if profile is not None and profile not in drop)
        flooded_before, flooded = self._flood_groups.update(drop=drop, put=put, context=context)
        old = [*flooded_before, *(flow for item in drop for flow in self._flows.get(item, ()))]
        added = {item: flows_of(item, context) for item in put}
        flows = [*flooded, *(flow for some in added.values() for flow in some)]
        if not self._flows:
            flows += base_flows()
        removed = {flow.key for flow in old} - {flow.key for flow in flows}
        meters = {meter for item in put for meter in meters_of(item, context)}
        unused_meters = {flow.meter for flow in old if flow.meter} - {meter.number for meter in meters}
        self._openflow.put_meters(meters)
        self._openflow.change(drop=removed, put=flows, flush=_zoned(stale, context))
        self._stale_conntrack.mark_flushed(stale)
        self._openflow.drop_meters(unused_meters)
        for item in drop:
            self._flows.pop(item, None)
            if isinstance(item, QosProfile):
                self._qos.pop(item.interface, None)
        self._flows |= added
        self._qos |= {item.interface: item for item in put if isinstance(item, QosProfile)}
        self._expected -= removed
        self._expected |= {flow.key for flow in flows}

    def forget_tenants(self, tenants: Set[TenantName]) -> None:
        """Forget stale addresses of tenants whose conntrack zones have been flushed."""
        self._stale_conntrack.forget_tenants(tenants)

    def rewrite_flow(self) -> None:
        """Put a flow that OVS already has: no effect on packets, but it triggers revalidation."""
        self._openflow.change(put=base_flows()[:1])

    def has_drifted(self) -> bool:
        """Whether OVS has another number of our flows than expected."""
        return self._openflow.count_flows() != len(self._expected)

    def was_flushed(self) -> bool:
        """Whether OVS has none of our flows: ovs-vswitchd has restarted."""
        return bool(self._expected) and not self._openflow.count_flows()

    @property
    def items(self) -> Set[StateItem]:
        """The state items that were applied."""
        return self._flows.keys()

    def missing_flows(self, item: StateItem) -> list[Flow]:
        """The flows of a state item that OVS does not have."""
        actual = {counted.flow for counted in self._openflow.read_flows()}
        return [flow for flow in self._flows.get(item, ()) if flow not in actual]

    def counters(self, tenants: Mapping[TenantName, int]) -> list[VerdictCounters]:
        """Packet counters of tenants, given with their IDs."""
        verdicts, reasons = self._count()
        return [
            VerdictCounters(
                tenant=tenant,
                verdicts={verdict_id: count for (owner, verdict_id), count in verdicts.items() if owner == tenant_id},
                reasons={reason: count for (owner, reason), count in reasons.items() if owner == tenant_id},
            )
            for tenant, tenant_id in sorted(tenants.items())
        ]

    def _count(self) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, str]]]:
        """Packets by tenant ID and verdict, and by tenant ID and built-in drop reason."""
        verdicts: Counter[tuple[int, int]] = Counter()
        reasons: Counter[tuple[int, str]] = Counter()
        for flow, _, packets in self._openflow.read_flows():
            # SpoofGuard flows match a port and write the tenant themselves.
            tenant = _matched(flow.key, TENANT) or _loaded(flow, TENANT)
            if not tenant:
                continue
            if flow.table in {Table.EGRESS_METRIC, Table.INGRESS_METRIC}:
                verdicts[tenant, _matched(flow.key, VERDICT) or 0] += packets
            elif reason := DROP_REASONS.get(_loaded(flow, VERDICT)):
                reasons[tenant, reason] += packets
        return verdicts, reasons


def _zoned(addresses: Iterable[TenantAddress], context: FlowContext) -> list[ZonedAddress]:
    """Addresses with their conntrack zones: the tenant ID is the zone."""
    return [(context.tenants[tenant], address) for tenant, address in addresses if tenant in context.tenants]


def _matched(key: FlowKey, name: str) -> int | None:
    return next((condition.value for condition in key.match if condition.name == name), None)


def _loaded(flow: Flow, name: str) -> int:
    """The value that a flow loads into a register, else 0."""
    return next((action.value for action in flow.actions if isinstance(action, SetField) and action.name == name), 0)
