"""QoS profiles as flows and meters: both match, and rates are never below the requested ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.ovs.openflow.meters import Meter
from weft.adapters.ovs.pipeline.context import FlowContext
from weft.adapters.ovs.pipeline.qos import meters_of, qos_flows
from weft.domain.addresses import Address
from weft.domain.desired.state import Port, QosProfile
from weft.domain.ids import TenantName

BLUE = TenantName("blue")
CONTEXT = FlowContext(tenants={BLUE: 1}, ports={"wpa": 5, "wpb": 6}, vtep=Address(4, 0xC0000201))
RATES = st.sampled_from([0, 1, 1_000_000, 6 << 20, 10**19])
PROFILES = st.builds(
    QosProfile, st.just(BLUE), st.sampled_from(["wpa", "wpb"]), RATES, st.just(10_000), st.integers(0, 63), RATES
)


@given(PROFILES)
def test_flows_use_exactly_the_meters_of_the_profile(profile: QosProfile) -> None:
    used = {flow.meter for flow in qos_flows(profile, CONTEXT)} - {0}
    assert used == {meter.number for meter in meters_of(profile, CONTEXT)}
    assert all(0 < meter.rate < 1 << 32 and meter.burst < 1 << 32 for meter in meters_of(profile, CONTEXT))
    assert len(used) == bool(profile.rate) + bool(profile.ingress_rate)


def test_no_two_ports_share_a_meter() -> None:
    one, other = (
        {meter.number for meter in meters_of(QosProfile(BLUE, name, 1, 1, 0, 1, 1), CONTEXT)} for name in ("wpa", "wpb")
    )
    assert not one & other


def test_bursts_are_long_enough_for_the_rate() -> None:
    """At least two GSO packets, a quarter of a second, or the requested burst."""

    def burst(rate: int, requested: int) -> int:
        (meter,) = meters_of(QosProfile(BLUE, "wpa", rate, requested, 0), CONTEXT)
        return meter.burst

    assert burst(1_000_000, 1500) == 1050
    assert burst(100_000_000, 1500) == 25_000
    assert burst(1_000_000, 1_000_000) == 8000


def test_a_profile_without_a_port_has_no_flows_and_meters() -> None:
    unplugged = QosProfile(BLUE, "wpc", 1, 1, 46, 1, 1)
    assert [*qos_flows(unplugged, CONTEXT)] == []
    assert [*meters_of(unplugged, CONTEXT)] == []
    assert [*meters_of(Port(BLUE, "wpa", "02:02:0a:00:00:01", ()), CONTEXT)] == []


def test_contivs_megabits_are_whole_kilobits() -> None:
    (meter,) = meters_of(QosProfile(BLUE, "wpa", 6 << 20, 0, 0), CONTEXT)
    assert meter == Meter(10, 6292, 1573)
