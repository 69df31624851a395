"""Shapes of ports as flows and meters (pure): how fast packets come from a workload and go to it, and their DSCP.

The switch does not make packets wait, it drops what comes too fast. So a burst is never shorter than what TCP needs to
keep a rate when nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.ovs.openflow.actions import SetField
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.openflow.meters import Meter
from weft.adapters.ovs.pipeline.context import ETHER_TYPES, FlowContext
from weft.adapters.ovs.pipeline.tables import LEAVES_BY, Table
from weft.domain.desired.state import QosProfile, StateItem

# A second's bits divided by this may come at once, whatever was asked for.
_BURSTS_PER_S = 4
# Kilobits: two of the largest segments that workloads hand to the switch whole.
_LEAST_BURST = 1050
_LARGEST = 0xFFFFFFFF


def base_flows() -> Iterator[Flow]:
    """What is not shaped passes."""
    yield Flow(Table.MARKING, 0, (), (), Table.INWARD)
    yield Flow(Table.INWARD, 0, (), (), Table.LEAVE)


def shape_flows(part: QosProfile, ground: FlowContext) -> Iterator[Flow]:
    """What a workload sends has the DSCP of its profile; the tunnel's packets get it from those inside."""
    port = ground.ports.get(part.interface)
    if not port:
        return
    if part.dscp or part.rate:
        marks = (SetField("ip_dscp", part.dscp),) if part.dscp else ()
        meter = _outward(port) if part.rate else 0
        for kind in ETHER_TYPES.values():
            yield Flow(Table.MARKING, 1, match({"in_port": port, "eth_type": kind}), marks, Table.INWARD, meter)
    if part.rate_in:
        yield Flow(Table.INWARD, 1, match({LEAVES_BY: port}), (), Table.LEAVE, _inward(port))


def meters_of(part: StateItem, ground: FlowContext) -> Iterator[Meter]:
    """The meters that the flows of a part name."""
    if not isinstance(part, QosProfile) or part.tenant not in ground.tenants:
        return
    port = ground.ports.get(part.interface)
    if port and part.rate:
        yield _meter(_outward(port), part.rate, part.burst)
    if port and part.rate_in:
        yield _meter(_inward(port), part.rate_in, part.burst_in)


def _outward(port: int) -> int:
    return 2 * port


def _inward(port: int) -> int:
    return 2 * port + 1


def _meter(number: int, rate: int, burst: int) -> Meter:
    """From bits and bytes to kilobits: rather more than asked for than less, and not more than a meter can be told."""
    rate = min(-(-rate // 1000), _LARGEST)
    return Meter(number, rate, min(max(burst * 8 // 1000, rate // _BURSTS_PER_S, _LEAST_BURST), _LARGEST))
