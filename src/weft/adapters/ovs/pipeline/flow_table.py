"""The flows of our bridge: what the parts of the node view consist of, brought into the switch and read back.

Their meters are there before them and go after them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager

from weft.adapters.netns.nft.policy_chains import REASONS
from weft.adapters.ovs.openflow.actions import SetField
from weft.adapters.ovs.openflow.client import OpenFlow, Zoned
from weft.adapters.ovs.openflow.flows import Flow, FlowKey
from weft.adapters.ovs.openflow.meters import Meter
from weft.adapters.ovs.pipeline.conntrack_flush import Owned, StaleConntrack
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.flood_groups import FloodGroups
from weft.adapters.ovs.pipeline.pipeline import base_flows, flows_of
from weft.adapters.ovs.pipeline.qos import meters_of
from weft.adapters.ovs.pipeline.tables import OUTCOME, TENANT, Table
from weft.domain.desired.state import Port, QosProfile, StateItem
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.ports.datapath import VerdictCounters


class FlowTable:
    """Remembers which flows each part consists of: that depends on numbers which may be gone when the part goes."""

    def __init__(self, openflow: OpenFlow) -> None:
        self._openflow = openflow
        self._made: dict[StateItem, tuple[Flow, ...]] = {}
        self._gatherings = FloodGroups()
        # Of all that the switch should have.
        self._keys: set[FlowKey] = set()
        # By the port, with which they go.
        self._shapes: dict[str, QosProfile] = {}
        self._leavers = StaleConntrack()
        # Whether the switch may not have what it should: a change has failed, or more is wanted than it was told.
        self._is_behind = False
        self._stands_by = False

    def expect(self, wanted: Set[StateItem]) -> None:
        """The switch is to have these parts as soon as it can: what it was told before may be withdrawn by now."""
        if self._made.keys() != wanted:
            self._is_behind = True

    @contextmanager
    def telling(self) -> Iterator[None]:
        """While the block runs, and when it fails until all fits again, the switch is behind."""
        was_behind, self._is_behind = self._is_behind, True
        yield
        self._is_behind, self._stands_by = was_behind, False

    def converge(self, wanted: Set[StateItem], ground: FlowContext) -> list[str]:
        """The switch has exactly the flows of these parts, all at once; what was done, in words."""
        told = self.parts
        flows = {each.flow for each in self._openflow.read_flows()}
        done = self._fit(wanted, ground, flows, {*self._openflow.read_meters()})
        left = self._leavers.change(drop=told - wanted, put=wanted - told)
        self._openflow.forget_connections(_zoned(left, ground))
        self._leavers.settle(left)
        return done

    def fill(self, wanted: Set[StateItem], ground: FlowContext) -> list[str]:
        """The same for a switch that is known to have none, so that nobody waits until it has said so again."""
        return self._fit(wanted, ground, set(), set())

    def look(self, *, is_current: bool) -> list[str]:
        """Hear the switch, as `Connection.look`; what was done for one that has just come back, in words.

        All packets are lost until it has its flows, so they stand by while it is away, and it has them at once if what
        it was told before still `is_current`.
        """
        before = self._openflow.connections
        try:
            self._openflow.look_anew(refill=is_current and not self._is_behind)
        except DatapathFault:
            self._stand_by()
            raise
        if self._openflow.connections == before:
            return []
        self._stands_by = False
        refilled = f"put all {len(self._keys)} flows into a switch that was started anew"
        return [refilled] if self._openflow.is_refilled else []

    def _stand_by(self) -> None:
        if not self._stands_by and not self._is_behind:
            self._openflow.stand_by([*self._all()])
            self._stands_by = True

    def _all(self) -> Iterator[Flow]:
        """What the switch has while it is not behind."""
        if self._keys:
            yield from base_flows()
        yield from self._gatherings.flows
        yield from (flow for flows in self._made.values() for flow in flows)

    def _fit(self, wanted: Set[StateItem], ground: FlowContext, actual: Set[Flow], found: Set[Meter]) -> list[str]:
        """The switch, which has these flows and meters, has exactly those of some parts."""
        self._is_behind = True
        made = {part: flows_of(part, ground) for part in wanted}
        gatherings = FloodGroups()
        _, joint = gatherings.change(drop=(), put=wanted, ground=ground)
        flows = {*base_flows(), *joint, *(flow for some in made.values() for flow in some)}
        keys = {flow.key for flow in flows}
        meters = {meter for part in wanted for meter in meters_of(part, ground)}
        strange = {meter.number for meter in found} - {meter.number for meter in meters}
        self._openflow.put_meters(meters - found)
        missing = flows - actual
        extra = {flow.key: flow for flow in actual if flow.key not in keys}
        self._openflow.change(drop=extra, put=missing)
        self._openflow.drop_meters(strange)
        self._made, self._gatherings, self._keys = made, gatherings, keys
        self._shapes = {part.interface: part for part in wanted if isinstance(part, QosProfile)}
        self._is_behind = self._stands_by = False
        return [
            *(f"put meter {meter}" for meter in meters - found),
            *(f"put flow {flow}" for flow in missing),
            *(f"removed flow {flow}" for flow in extra.values()),
            *(f"removed meter {number}" for number in strange),
        ]

    def change(
        self, *, drop: Iterable[StateItem], put: Iterable[StateItem], ground: FlowContext, new: Set[Owned] = frozenset()
    ) -> None:
        """No more of what some parts are made of, and what others are made of, all at once.

        The shape of a port goes with it. Then the connections of who was at their addresses before are forgotten, and
        of those at `new` ones: the flows are others by then, so no connection comes back.
        """
        drop, put = tuple(drop), tuple(put)
        forgotten = new | self._leavers.change(drop=drop, put=put)
        left = [self._shapes.get(part.interface) for part in drop if isinstance(part, Port)]
        drop += tuple(shape for shape in left if shape is not None and shape not in drop)
        before, after = self._gatherings.change(drop=drop, put=put, ground=ground)
        old = [*before, *(flow for part in drop for flow in self._made.get(part, ()))]
        gone = {flow.key for flow in old}
        come = {part: flows_of(part, ground) for part in put}
        flows = [*after, *(flow for some in come.values() for flow in some)]
        if not self._made:
            flows += base_flows()
        gone -= {flow.key for flow in flows}
        meters = {meter for part in put for meter in meters_of(part, ground)}
        unused = {flow.meter for flow in old if flow.meter} - {meter.number for meter in meters}
        self._openflow.put_meters(meters)
        self._openflow.change(drop=gone, put=flows, forget=_zoned(forgotten, ground))
        self._leavers.settle(forgotten)
        self._openflow.drop_meters(unused)
        for part in drop:
            self._made.pop(part, None)
            if isinstance(part, QosProfile):
                self._shapes.pop(part.interface, None)
        self._made |= come
        self._shapes |= {part.interface: part for part in put if isinstance(part, QosProfile)}
        self._keys -= gone
        self._keys |= {flow.key for flow in flows}

    def forget(self, tenants: Set[TenantName]) -> None:
        """Nothing is left of these tenants, nor of their connections."""
        self._leavers.forget(tenants)

    def rewrite_flow(self) -> None:
        """Put a flow that is there: nothing is another than before, but the switch looks whether it is."""
        self._openflow.change(put=base_flows()[:1])

    def is_disturbed(self) -> bool:
        """Whether the switch has more or fewer flows of ours than it should."""
        return self._openflow.count_flows() != len(self._keys)

    def are_gone(self) -> bool:
        """Whether the switch has none of the flows that it had: it was started anew."""
        return bool(self._keys) and not self._openflow.count_flows()

    @property
    def parts(self) -> Set[StateItem]:
        """Those that were told of."""
        return self._made.keys()

    def lacks(self, part: StateItem) -> list[Flow]:
        """The flows of a part that the switch has not."""
        there = {each.flow for each in self._openflow.read_flows()}
        return [flow for flow in self._made.get(part, ()) if flow not in there]

    def counters(self, tenants: Mapping[TenantName, int]) -> list[VerdictCounters]:
        """The counts of tenants, by their numbers."""
        outcomes, reasons = self._count()
        return [
            VerdictCounters(
                tenant=tenant,
                outcomes={outcome: count for (number, outcome), count in outcomes.items() if number == own},
                reasons={reason: count for (number, reason), count in reasons.items() if number == own},
            )
            for tenant, own in sorted(tenants.items())
        ]

    def _count(self) -> tuple[Counter[tuple[int, int]], Counter[tuple[int, str]]]:
        """How many packets met each outcome, and each reason of our own, by the tenant's number."""
        outcomes: Counter[tuple[int, int]] = Counter()
        reasons: Counter[tuple[int, str]] = Counter()
        for flow, _, packets in self._openflow.read_flows():
            tenant = _value(flow.key, TENANT) or _written(flow, TENANT)
            if not tenant:
                continue
            if flow.table in {Table.EGRESS_MET, Table.INGRESS_MET}:
                outcomes[tenant, _value(flow.key, OUTCOME) or 0] += packets
            elif reason := REASONS.get(_written(flow, OUTCOME)):
                reasons[tenant, reason] += packets
        return outcomes, reasons


def _zoned(addresses: Iterable[Owned], ground: FlowContext) -> list[Zoned]:
    """Where the tracker has connections of addresses: a tenant's number is its zone."""
    return [(ground.tenants[tenant], address) for tenant, address in addresses if tenant in ground.tenants]


def _value(key: FlowKey, name: str) -> int | None:
    return next((condition.value for condition in key.match if condition.name == name), None)


def _written(flow: Flow, name: str) -> int:
    """What a flow writes into a register, 0 when it does not."""
    return next((each.value for each in flow.actions if isinstance(each, SetField) and each.name == name), 0)
