"""Who is on each segment: what is flooded there goes to all, so those flows belong to no single part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.l2 import gathering_flows
from weft.domain.desired.segments import Segment
from weft.domain.desired.state import Overlay, Port, StateItem, VlanTrunk
from weft.domain.ids import TenantName

# A segment by its tenant and its number.
Place = tuple[TenantName, int]


class FloodGroups:
    """The segments that were told of, and their members."""

    def __init__(self) -> None:
        self._segments: dict[Place, Segment] = {}
        self._members: defaultdict[Place, set[Port | Overlay | VlanTrunk]] = defaultdict(set)
        self._made: dict[Place, tuple[Flow, ...]] = {}

    def change(
        self, *, drop: Iterable[StateItem], put: Iterable[StateItem], ground: FlowContext
    ) -> tuple[tuple[Flow, ...], tuple[Flow, ...]]:
        """Some parts are gone, and others have come: the flows that were of the segments concerned, and those to be."""
        touched = {place for part in drop if (place := self._forget(part))}
        touched |= {place for part in put if (place := self._note(part))}
        before = tuple(flow for place in touched for flow in self._made.pop(place, ()))
        for place in touched & self._segments.keys():
            self._made[place] = tuple(self._flows_at(place, ground))
        return before, tuple(flow for place in touched for flow in self._made.get(place, ()))

    @property
    def flows(self) -> Iterator[Flow]:
        """Those of all segments."""
        return (flow for made in self._made.values() for flow in made)

    def _flows_at(self, place: Place, ground: FlowContext) -> Iterator[Flow]:
        members = self._members.get(place, ())
        ports = [member for member in members if isinstance(member, Port)]
        return gathering_flows(self._segments[place], ports, reaches=len(members) > len(ports), ground=ground)

    def _note(self, part: StateItem) -> Place | None:
        place = _place(part)
        if isinstance(part, Segment):
            self._segments[part.tenant, part.number] = part
        elif place and isinstance(part, Port | Overlay | VlanTrunk):
            self._members[place].add(part)
        return place

    def _forget(self, part: StateItem) -> Place | None:
        place = _place(part)
        if place and isinstance(part, Segment):
            self._segments.pop(place, None)
        elif place and isinstance(part, Port | Overlay | VlanTrunk):
            self._members[place].discard(part)
            if not self._members[place]:
                del self._members[place]
        return place


def _place(part: StateItem) -> Place | None:
    """The segment that a part is, or is on."""
    match part:
        case Segment():
            return part.tenant, part.number
        case Port() if part.segment:
            return part.tenant, part.segment
        case Overlay():
            return part.tenant, part.vni
        case VlanTrunk():
            return part.tenant, part.number
        case _:
            return None
