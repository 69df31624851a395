"""Members of each L2 segment. Flood flows list all members, so they belong to the segment and not to one state item."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.l2 import flood_flows
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Overlay, Port, StateItem, VlanTrunk
from weft.domain.ids import TenantName

# Tenant and segment number.
SegmentKey = tuple[TenantName, int]


class FloodGroups:
    """The segments of this node with their members and flows."""

    def __init__(self) -> None:
        self._segments: dict[SegmentKey, Segment] = {}
        self._members: defaultdict[SegmentKey, set[Port | Overlay | VlanTrunk]] = defaultdict(set)
        self._flows: dict[SegmentKey, tuple[Flow, ...]] = {}

    def update(
        self, *, drop: Iterable[StateItem], put: Iterable[StateItem], context: FlowContext
    ) -> tuple[tuple[Flow, ...], tuple[Flow, ...]]:
        """Record a change of state items; the old and the new flows of all segments it affects."""
        affected = {key for item in drop if (key := self._remove(item))}
        affected |= {key for item in put if (key := self._add(item))}
        before = tuple(flow for key in affected for flow in self._flows.pop(key, ()))
        # A member may be known before its segment.
        for key in affected & self._segments.keys():
            self._flows[key] = tuple(self._segment_flows(key, context))
        return before, tuple(flow for key in affected for flow in self._flows.get(key, ()))

    @property
    def flows(self) -> Iterator[Flow]:
        """The flows of all segments."""
        return (flow for flows in self._flows.values() for flow in flows)

    def _segment_flows(self, key: SegmentKey, context: FlowContext) -> Iterator[Flow]:
        members = self._members.get(key, ())
        ports = [member for member in members if isinstance(member, Port)]
        # A member that is not a port is an overlay or a trunk.
        return flood_flows(self._segments[key], ports, is_extended=len(members) > len(ports), context=context)

    def _add(self, item: StateItem) -> SegmentKey | None:
        key = _segment_key(item)
        if isinstance(item, Segment):
            self._segments[item.tenant, item.number] = item
        elif key and isinstance(item, Port | Overlay | VlanTrunk):
            self._members[key].add(item)
        return key

    def _remove(self, item: StateItem) -> SegmentKey | None:
        key = _segment_key(item)
        if key and isinstance(item, Segment):
            self._segments.pop(key, None)
        elif key and isinstance(item, Port | Overlay | VlanTrunk):
            self._members[key].discard(item)
            if not self._members[key]:
                del self._members[key]
        return key


def _segment_key(item: StateItem) -> SegmentKey | None:
    """The segment that a state item defines, or is a member of."""
    match item:
        case Segment() | VlanTrunk():
            return item.tenant, item.number
        case Port() if item.segment:
            return item.tenant, item.segment
        case Overlay():
            return item.tenant, item.vni
        case _:
            return None
