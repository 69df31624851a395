"""Parts as flows: what each part consists of, that no two share a flow, and that numbers decide as the parts say."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.support.paths import DOCS

from weft.adapters.netns.nft.policy_chains import BETWEEN
from weft.adapters.ovs.openflow.actions import Output, PopVlan, PushVlan, SetField
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import FlowContext, blocks
from weft.adapters.ovs.pipeline.flood_groups import FloodGroups
from weft.adapters.ovs.pipeline.forwarding import PORT_MAC_NUMBER
from weft.adapters.ovs.pipeline.pipeline import base_flows, flows_of, not_carried, without_uplinks
from weft.adapters.ovs.pipeline.tables import FROM_WORKLOAD, PURPOSES, Table, reference
from weft.domain.addresses import Address, Range
from weft.domain.desired.segments import RemoteMac, Segment, wire_number
from weft.domain.desired.state import (
    Gateway,
    Overlay,
    Port,
    Prefix,
    QosProfile,
    RemoteRoute,
    StateItem,
    TenantNetns,
    VlanTrunk,
    VxlanPeer,
)
from weft.domain.host_access.state import HostLink, RemoteHostReturnRoute
from weft.domain.ids import TenantName
from weft.domain.loadbalancer.state import Vip
from weft.domain.model import NetworkTags
from weft.domain.policy.model.rules import Direction
from weft.domain.policy.policymap.policy_state import (
    VERDICT_DENY,
    WORKLOAD,
    CidrIdentity,
    IpIdentity,
    PolicyEntry,
    VerdictCounter,
)

BLUE, RED = TenantName("blue"), TenantName("red")
TAGGED = wire_number(NetworkTags(vlan=7))
GROUND = FlowContext(
    tenants={BLUE: 1, RED: 2},
    ports={"wpa": 5, "wpb": 6, "wpc": 7, "wpd": 8, "wx7": 9, "wl1": 12, "wl1x": 13},
    vtep=Address(4, 0xC0000201),
    trunk=11,
)
A, B = Address(4, 0x0A000001), Address(4, 0x0A000002)
A6, B6 = Address(6, 0xFD << 120 | 1), Address(6, 0xFD << 120 | 2)
PARTS: list[StateItem] = [
    TenantNetns(BLUE),
    TenantNetns(RED),
    Gateway(BLUE, Address(4, 0x0A0000FE)),
    Gateway(BLUE, Address(6, 0xFD << 120 | 0xFE)),
    Overlay(BLUE, 7),
    VxlanPeer(BLUE, 7, "192.0.2.2"),
    RemoteRoute(BLUE, Prefix(4, 0x0A000040, 26), 7, "192.0.2.2"),
    RemoteRoute(BLUE, Prefix(4, 0x0A000001, 32), 7, "192.0.2.2"),
    Port(BLUE, "wpa", "02:02:0a:00:00:01", (A, A6)),
    Port(RED, "wpb", "02:02:0a:00:00:01", (A,)),
    Segment(BLUE, 7, floods=True),
    Gateway(BLUE, Address(4, 0x0A0000FD), 7),
    Port(BLUE, "wpc", "02:02:0a:00:00:02", (B, B6), 7),
    RemoteMac(BLUE, 7, "192.0.2.2", "02:02:0a:00:00:03", (Address(4, 0x0A000003),)),
    RemoteMac(BLUE, 7, "192.0.2.2", "02:02:0a:00:00:02", (B, B6)),
    VlanTrunk(BLUE, TAGGED),
    Segment(BLUE, TAGGED, floods=True),
    Port(BLUE, "wpd", "02:02:0a:00:00:04", (Address(4, 0x0A000004),), TAGGED),
    RemoteMac(BLUE, TAGGED, "192.0.2.2", "02:02:0a:00:00:05", (Address(4, 0x0A000005),)),
    VlanTrunk(RED, TAGGED + 1),
    RemoteRoute(RED, Prefix(4, 0x0A000040, 26), TAGGED + 1, "192.0.2.2"),
    IpIdentity(BLUE, A, WORKLOAD | 1),
    IpIdentity(RED, A, WORKLOAD | 2),
    CidrIdentity(BLUE, Range(4, 0x0A000003, 0x0A000050), 3),
    PolicyEntry(BLUE, Direction.INGRESS, WORKLOAD | 1, None, VERDICT_DENY | 9),
    PolicyEntry(BLUE, Direction.INGRESS, WORKLOAD | 1, 3, 8, 6, (80, 80)),
    PolicyEntry(BLUE, Direction.INGRESS, WORKLOAD | 1, 3, 8, 6, (81, 90)),
    PolicyEntry(BLUE, Direction.EGRESS, WORKLOAD | 1, 3, 8, 6),
    VerdictCounter(BLUE, 8),
    VerdictCounter(BLUE, VERDICT_DENY | 9),
    QosProfile(BLUE, "wpa", 0, 0, 46),
    QosProfile(BLUE, "wpc", 6_000_000, 10_000, 0, 8_000_000, 10_000),
    Vip(BLUE, Address(4, 0x0A0000C8)),
    Vip(BLUE, Address(6, 0xFD << 120 | 0xC8)),
    RemoteHostReturnRoute(BLUE, 7, "192.0.2.2", Address(4, 0xC0000202)),
    HostLink(BLUE, (Address(4, 0xC0000201), Address(6, 0xFD77 << 112 | 0xC0000201))),
    RemoteHostReturnRoute(RED, TAGGED + 1, "192.0.2.2", Address(4, 0xC0000202)),
]


def together(parts: Iterable[StateItem]) -> tuple[Flow, ...]:
    """What segments consist of, beside their parts."""
    return FloodGroups().change(drop=(), put=parts, ground=GROUND)[1]


def test_no_two_parts_have_a_flow_in_common() -> None:
    made = [{flow.key for flow in flows_of(part, GROUND)} for part in PARTS]
    made += [{flow.key for flow in base_flows()}, {flow.key for flow in together(PARTS)}]
    for one, other in itertools.combinations(made, 2):
        assert not one & other


def test_a_part_makes_each_flow_once() -> None:
    for part in PARTS:
        flows = flows_of(part, GROUND)
        assert len({flow.key for flow in flows}) == len(flows)


def test_packets_only_go_forward() -> None:
    """No packet goes round: what follows a table has a higher number."""
    flows = [*base_flows(), *together(PARTS), *(flow for part in PARTS for flow in flows_of(part, GROUND))]
    assert all(flow.goto is None or flow.goto > flow.table for flow in flows)
    assert {flow.table for flow in flows} == set(Table)


def test_nothing_is_made_of_what_the_switch_does_not_have() -> None:
    nowhere = FlowContext(tenants={}, ports={}, vtep=Address(4, 1))
    assert all(flows_of(part, nowhere) == () for part in PARTS)
    unplugged = FlowContext(tenants={BLUE: 1}, ports={}, vtep=Address(4, 1))
    assert flows_of(PARTS[8], unplugged) == ()


def test_a_port_speaks_with_its_own_mac_and_address_only() -> None:
    arrivals = [flow for flow in flows_of(PARTS[8], GROUND) if flow.table == Table.ARRIVAL]
    passing = [flow for flow in arrivals if flow.goto is not None]
    assert passing
    for flow in passing:
        named = {condition.name: condition.value for condition in flow.match}
        assert (named["in_port"], named["eth_src"]) == (5, 0x02020A000001)
        assert {named.get("ip_src"), named.get("ipv6_src"), named.get("arp_spa")} & {A.number, A6.number}


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
def test_ranges_are_covered_exactly(one: int, other: int) -> None:
    first, last = sorted((one, other))
    covered = [number for base, mask in blocks(first, last, bits=16) for number in _numbers(base, mask)]
    assert covered == [*range(first, last + 1)]


def _numbers(base: int, mask: int) -> range:
    return range(base, base + (1 << 16) - mask)


def test_ports_of_protocols_without_ports_match_nothing() -> None:
    assert flows_of(PolicyEntry(BLUE, Direction.INGRESS, 1, None, 8, 1, (80, 80)), GROUND) == ()


def test_what_is_not_carried_is_told_and_not_passed_over() -> None:
    assert not_carried(PARTS) == []


def test_only_frames_of_the_networks_tag_are_taken_from_the_wire() -> None:
    """And they leave with it, never from the MAC that all nodes share; nothing is made where there are no uplinks."""
    flows = [*together(PARTS), *(flow for part in PARTS for flow in flows_of(part, GROUND))]
    taken = [flow for flow in flows if {"in_port": 11}.items() <= values(flow).items()]
    assert {values(flow)["vlan_vid"] for flow in taken} == {0x1007, 0x1008}
    assert all(PopVlan() in flow.actions for flow in taken)
    leaving = [flow for flow in flows if Output(11) in flow.actions or SetField("reg4", 11) in flow.actions]
    assert leaving
    assert all(PushVlan() in flow.actions for flow in leaving)
    assert not [flow for flow in leaving if SetField("eth_src", PORT_MAC_NUMBER) in flow.actions]
    cut_off = msgspec.structs.replace(GROUND, trunk=0)
    assert not [flow for part in PARTS for flow in flows_of(part, cut_off) if PushVlan() in flow.actions]
    assert without_uplinks(PARTS) == [
        f"frames with VLAN tag {tag} do not leave this node: name its uplinks by --vlan-uplinks" for tag in (7, 8)
    ]


def test_between_networks_only_answers_are_led() -> None:
    """N3: what a workload of another segment opens itself is refused by name; so is a foreign gateway."""
    for part in (part for part in PARTS if isinstance(part, Port | RemoteMac | Gateway) and segment_of(part)):
        flows = [flow for flow in flows_of(part, GROUND) if flow.table == Table.ROUTE and "reg10" not in values(flow)]
        own = {flow for flow in flows if values(flow)["reg5"] == FROM_WORKLOAD}
        refusing = {flow for flow in own if SetField("reg3", BETWEEN) in flow.actions}
        assert refusing
        assert all("ct_state" in values(flow) for flow in own - refusing)
        assert all(flow.goto == Table.SERVICE for flow in own - refusing)


def segment_of(part: Port | RemoteMac | Gateway) -> int:
    return part.vni if isinstance(part, RemoteMac) else part.segment


def values(flow: Flow) -> dict[str, int]:
    return {condition.name: condition.value for condition in flow.match}


def test_every_table_has_a_purpose_and_the_page_tells_it() -> None:
    assert PURPOSES.keys() == set(Table)
    page = DOCS / "reference" / "ovs-tables.md"
    assert page.read_text() == reference(), "run `make docs`"


def test_flows_are_told_in_words_that_name_everything() -> None:
    (flow,) = flows_of(next(part for part in PARTS if isinstance(part, PolicyEntry)), GROUND)
    assert isinstance(flow, Flow)
    assert str(flow) == (
        f"table={Table.INGRESS},priority=1,reg0=0x1,reg2=0x10000001,"
        f"actions=set_field:0x80000009->reg3,goto_table:{Table.INGRESS_MET}"
    )
