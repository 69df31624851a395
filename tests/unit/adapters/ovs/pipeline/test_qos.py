"""Shapes as flows and meters: both name each other, and rates are not less than asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.ovs.openflow.meters import Meter
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.qos import meters_of, shape_flows
from weft.domain.addresses import Address
from weft.domain.desired.state import Port, QosProfile
from weft.domain.ids import TenantName

BLUE = TenantName("blue")
GROUND = FlowContext(tenants={BLUE: 1}, ports={"wpa": 5, "wpb": 6}, vtep=Address(4, 0xC0000201))
RATES = st.sampled_from([0, 1, 1_000_000, 6 << 20, 10**19])
SHAPES = st.builds(
    QosProfile, st.just(BLUE), st.sampled_from(["wpa", "wpb"]), RATES, st.just(10_000), st.integers(0, 63), RATES
)


@given(SHAPES)
def test_flows_name_the_meters_that_are_made_for_them(shape: QosProfile) -> None:
    named = {flow.meter for flow in shape_flows(shape, GROUND)} - {0}
    assert named == {meter.number for meter in meters_of(shape, GROUND)}
    assert all(0 < meter.rate < 1 << 32 and meter.burst < 1 << 32 for meter in meters_of(shape, GROUND))
    assert len(named) == bool(shape.rate) + bool(shape.rate_in)


def test_no_two_ports_share_a_meter() -> None:
    one, other = (
        {meter.number for meter in meters_of(QosProfile(BLUE, name, 1, 1, 0, 1, 1), GROUND)} for name in ("wpa", "wpb")
    )
    assert not one & other


def test_bursts_are_long_enough_for_the_rate() -> None:
    """Two of the largest segments, a part of a second's bits, or what was asked for where that is more."""

    def burst(rate: int, asked: int) -> int:
        (meter,) = meters_of(QosProfile(BLUE, "wpa", rate, asked, 0), GROUND)
        return meter.burst

    assert burst(1_000_000, 1500) == 1050
    assert burst(100_000_000, 1500) == 25_000
    assert burst(1_000_000, 1_000_000) == 8000


def test_nothing_is_made_where_there_is_no_port() -> None:
    lost = QosProfile(BLUE, "wpc", 1, 1, 46, 1, 1)
    assert [*shape_flows(lost, GROUND)] == []
    assert [*meters_of(lost, GROUND)] == []
    assert [*meters_of(Port(BLUE, "wpa", "02:02:0a:00:00:01", ()), GROUND)] == []


def test_contivs_megabits_are_whole_kilobits() -> None:
    (meter,) = meters_of(QosProfile(BLUE, "wpa", 6 << 20, 0, 0), GROUND)
    assert meter == Meter(10, 6292, 1573)
