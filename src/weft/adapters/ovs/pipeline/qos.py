"""QoS profiles as flows and meters (pure): bandwidth limits in both directions, and DSCP.

A meter drops packets above its rate, it does not queue. So a burst is never smaller than what TCP needs to keep the
rate without a queue.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.adapters.ovs.openflow.actions import SetField
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.openflow.meters import Meter
from weft.adapters.ovs.pipeline.context import ETHER_TYPES, FlowContext
from weft.adapters.ovs.pipeline.tables import OUTPUT_PORT, Table
from weft.domain.desired.state import QosProfile, StateItem

# The burst is at least rate / 4, a quarter of a second: docs/design/ovs.md has the measurements.
_BURSTS_PER_S = 4
# Kilobits: two GSO packets of 64 KiB, which workloads hand to the switch unsegmented.
_MIN_BURST = 1050
# OpenFlow has 32 bits for rates and bursts.
_MAX_UINT32 = 0xFFFFFFFF


def base_flows() -> Iterator[Flow]:
    """Pass packets that no profile limits."""
    yield Flow(Table.EGRESS_METER, 0, (), (), Table.INGRESS_METER)
    yield Flow(Table.INGRESS_METER, 0, (), (), Table.CONNTRACK_COMMIT)


def qos_flows(item: QosProfile, context: FlowContext) -> Iterator[Flow]:
    """Set the DSCP of what a workload sends, and apply its meters. VXLAN copies the inner DSCP to the outer header."""
    port = context.ports.get(item.interface)
    if not port:
        return
    if item.dscp or item.rate:
        set_dscp = (SetField("ip_dscp", item.dscp),) if item.dscp else ()
        meter = _egress_meter_id(port) if item.rate else 0
        for ether_type in ETHER_TYPES.values():
            conditions = match({"in_port": port, "eth_type": ether_type})
            yield Flow(Table.EGRESS_METER, 1, conditions, set_dscp, Table.INGRESS_METER, meter)
    if item.ingress_rate:
        to_port = match({OUTPUT_PORT: port})
        yield Flow(Table.INGRESS_METER, 1, to_port, (), Table.CONNTRACK_COMMIT, _ingress_meter_id(port))


def meters_of(item: StateItem, context: FlowContext) -> Iterator[Meter]:
    """The meters that the flows of a state item use."""
    if not isinstance(item, QosProfile) or item.tenant not in context.tenants:
        return
    port = context.ports.get(item.interface)
    if port and item.rate:
        yield _meter(_egress_meter_id(port), item.rate, item.burst)
    if port and item.ingress_rate:
        yield _meter(_ingress_meter_id(port), item.ingress_rate, item.ingress_burst)


# Meters have no cookie, so their IDs are derived from the port: a restarted agent finds the same ones.
def _egress_meter_id(port: int) -> int:
    return 2 * port


def _ingress_meter_id(port: int) -> int:
    return 2 * port + 1


def _meter(number: int, rate: int, burst: int) -> Meter:
    """A meter for bits per second and bytes. OpenFlow counts both in kilobits; round the rate up."""
    rate = min(-(-rate // 1000), _MAX_UINT32)
    return Meter(number, rate, min(max(burst * 8 // 1000, rate // _BURSTS_PER_S, _MIN_BURST), _MAX_UINT32))
