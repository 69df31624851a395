"""State items as flows: each has its own flows, no two share one, and flows refer only to known ports and tenants."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.support.paths import DOCS

from weft.adapters.netns.drop_reasons import DROP_CROSS_NETWORK
from weft.adapters.ovs.openflow.actions import Output, PopVlan, PushVlan, SetField
from weft.adapters.ovs.openflow.flows import Flow
from weft.adapters.ovs.pipeline.context import FlowContext, range_to_masks
from weft.adapters.ovs.pipeline.flood_groups import FloodGroups
from weft.adapters.ovs.pipeline.forwarding import PORT_MAC_INT
from weft.adapters.ovs.pipeline.pipeline import base_flows, flows_of, tags_without_uplink, unsupported_items
from weft.adapters.ovs.pipeline.tables import LOCAL_WORKLOAD, NAMES, PURPOSES, Table, reference
from weft.domain.addresses import Address, Range
from weft.domain.desired.segments import RemoteMac, Segment, encap_id
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
TAGGED = encap_id(NetworkTags(vlan=7))
CONTEXT = FlowContext(
    tenants={BLUE: 1, RED: 2},
    ports={"wpa": 5, "wpb": 6, "wpc": 7, "wpd": 8, "wx7": 9, "wl1": 12, "wl1x": 13},
    vtep=Address(4, 0xC0000201),
    trunk=11,
)
A, B = Address(4, 0x0A000001), Address(4, 0x0A000002)
A6, B6 = Address(6, 0xFD << 120 | 1), Address(6, 0xFD << 120 | 2)
ITEMS: list[StateItem] = [
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


def flood_flows(items: Iterable[StateItem]) -> tuple[Flow, ...]:
    """The flows of segments, which belong to no single item."""
    return FloodGroups().update(drop=(), put=items, context=CONTEXT)[1]


def test_no_two_items_share_a_flow() -> None:
    made = [{flow.key for flow in flows_of(item, CONTEXT)} for item in ITEMS]
    made += [{flow.key for flow in base_flows()}, {flow.key for flow in flood_flows(ITEMS)}]
    for one, other in itertools.combinations(made, 2):
        assert not one & other


def test_an_item_has_each_flow_once() -> None:
    for item in ITEMS:
        flows = flows_of(item, CONTEXT)
        assert len({flow.key for flow in flows}) == len(flows)


def test_goto_only_leads_to_higher_tables() -> None:
    """OpenFlow demands it, and every table is used."""
    flows = [*base_flows(), *flood_flows(ITEMS), *(flow for item in ITEMS for flow in flows_of(item, CONTEXT))]
    assert all(flow.goto is None or flow.goto > flow.table for flow in flows)
    assert {flow.table for flow in flows} == set(Table)


def test_items_of_unknown_tenants_and_ports_have_no_flows() -> None:
    no_tenants = FlowContext(tenants={}, ports={}, vtep=Address(4, 1))
    assert all(flows_of(item, no_tenants) == () for item in ITEMS)
    no_ports = FlowContext(tenants={BLUE: 1}, ports={}, vtep=Address(4, 1))
    assert flows_of(ITEMS[8], no_ports) == ()


def test_spoofguard_requires_the_ports_own_mac_and_address() -> None:
    classifier = [flow for flow in flows_of(ITEMS[8], CONTEXT) if flow.table == Table.CLASSIFIER]
    accepted = [flow for flow in classifier if flow.goto is not None]
    assert accepted
    for flow in accepted:
        fields = {condition.name: condition.value for condition in flow.match}
        assert (fields["in_port"], fields["eth_src"]) == (5, 0x02020A000001)
        assert {fields.get("ip_src"), fields.get("ipv6_src"), fields.get("arp_spa")} & {A.number, A6.number}


@given(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF))
def test_ranges_are_covered_exactly(one: int, other: int) -> None:
    first, last = sorted((one, other))
    covered = [number for base, mask in range_to_masks(first, last, bits=16) for number in _numbers(base, mask)]
    assert covered == [*range(first, last + 1)]


def _numbers(base: int, mask: int) -> range:
    return range(base, base + (1 << 16) - mask)


def test_ports_of_protocols_without_ports_match_nothing() -> None:
    assert flows_of(PolicyEntry(BLUE, Direction.INGRESS, 1, None, 8, 1, (80, 80)), CONTEXT) == ()


def test_all_items_are_supported() -> None:
    assert unsupported_items(ITEMS) == []


def test_only_frames_with_the_networks_tag_are_accepted_from_uplinks() -> None:
    """They are sent with the tag too, never from the gateway MAC of all nodes. Without uplinks there are no flows."""
    flows = [*flood_flows(ITEMS), *(flow for item in ITEMS for flow in flows_of(item, CONTEXT))]
    accepted = [flow for flow in flows if {"in_port": 11}.items() <= values(flow).items()]
    assert {values(flow)["vlan_vid"] for flow in accepted} == {0x1007, 0x1008}
    assert all(PopVlan() in flow.actions for flow in accepted)
    tagged = [flow for flow in flows if Output(11) in flow.actions or SetField("reg4", 11) in flow.actions]
    assert tagged
    assert all(PushVlan() in flow.actions for flow in tagged)
    assert not [flow for flow in tagged if SetField("eth_src", PORT_MAC_INT) in flow.actions]
    no_uplink = msgspec.structs.replace(CONTEXT, trunk=0)
    assert not [flow for item in ITEMS for flow in flows_of(item, no_uplink) if PushVlan() in flow.actions]
    assert tags_without_uplink(ITEMS) == [
        f"frames with VLAN tag {tag} do not leave this node: name its uplinks by --vlan-uplinks" for tag in (7, 8)
    ]


def test_only_replies_are_forwarded_between_networks() -> None:
    """N3: a connection from another segment is dropped with its own reason, also one to a foreign gateway."""
    for item in (item for item in ITEMS if isinstance(item, Port | RemoteMac | Gateway) and segment_of(item)):
        flows = [
            flow
            for flow in flows_of(item, CONTEXT)
            if flow.table == Table.L3_FORWARDING and "reg10" not in values(flow)
        ]
        own = {flow for flow in flows if values(flow)["reg5"] == LOCAL_WORKLOAD}
        dropping = {flow for flow in own if SetField("reg3", DROP_CROSS_NETWORK) in flow.actions}
        assert dropping
        assert all("ct_state" in values(flow) for flow in own - dropping)
        assert all(flow.goto == Table.L4_KEY for flow in own - dropping)


def segment_of(item: Port | RemoteMac | Gateway) -> int:
    return item.vni if isinstance(item, RemoteMac) else item.segment


def values(flow: Flow) -> dict[str, int]:
    return {condition.name: condition.value for condition in flow.match}


def test_every_table_is_on_the_reference_page() -> None:
    assert PURPOSES.keys() == NAMES.keys() == set(Table)
    assert len({*NAMES.values()}) == len(NAMES)
    assert all(name.isalnum() for name in NAMES.values())
    page = DOCS / "reference" / "ovs-tables.md"
    assert page.read_text() == reference(), "run `make docs`"


def test_flows_print_in_ovs_ofctl_syntax() -> None:
    (flow,) = flows_of(next(item for item in ITEMS if isinstance(item, PolicyEntry)), CONTEXT)
    assert isinstance(flow, Flow)
    assert str(flow) == (
        f"table={Table.INGRESS_RULE},priority=1,reg0=0x1,reg2=0x10000001,"
        f"actions=set_field:0x80000009->reg3,goto_table:{Table.INGRESS_METRIC}"
    )
