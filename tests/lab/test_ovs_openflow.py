"""Our OpenFlow against a real switch, with ovs-ofctl as the judge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.adapters.ovs.openflow.actions import (
    Ct,
    DecrementTtl,
    Move,
    Output,
    OutputRegister,
    PopVlan,
    PushVlan,
    Resubmit,
    SetField,
)
from weft.adapters.ovs.openflow.client import OpenFlow
from weft.adapters.ovs.openflow.constants import OFPP_IN_PORT, OFPP_NORMAL
from weft.adapters.ovs.openflow.fields import match
from weft.adapters.ovs.openflow.flows import OWNER, Flow
from weft.adapters.ovs.openflow.meters import Meter
from weft.domain.addresses import parse_address
from weft.domain.errors import DatapathFault
from weft.lab.servers.openvswitch import Switch, running_switch

MAC = 0xEEEEEEEEEEEE
TRACKED = (0x20, 0x30)
# UDP from port 1 of 10.0.0.1 to port 2 of 10.0.0.2, in hexadecimal.
PACKET = "0200000000020200000000010800450000240001000009119dc60a0000010a00000200010002001000000000000000000000"
V4, V6, ARP = 0x0800, 0x86DD, 0x0806
FLOWS = [
    Flow(0, 10, match({"in_port": 3, "eth_type": V4, "ip_src": (0x0A000000, 0xFF000000)}), (SetField("reg0", 5),), 2),
    Flow(0, 10, match({"in_port": 3, "eth_src": MAC, "eth_type": V6, "ipv6_src": 1 << 127}), (SetField("reg0", 5),), 2),
    Flow(1, 1, match({"eth_type": V4, "ip_proto": 6, "tcp_dst": (80, 0xFFF0)}), (SetField("ip_dscp", 46), Output(9))),
    Flow(2, 3, match({"eth_type": V4}), (Ct("reg0", 3),)),
    Flow(0, 7, match({"vlan_vid": (0x1000, 0x1000)}), (Output(OFPP_NORMAL),)),
    Flow(0, 8, match({"vlan_vid": 0x1064, "eth_type": V4}), (PopVlan(),), 1),
    Flow(1, 8, match({"eth_type": V4}), (PushVlan(), SetField("vlan_vid", 0x1064), Output(1))),
    Flow(2, 4, match({"eth_type": V4, "ct_state": TRACKED}), (Ct("reg0", commit=True), DecrementTtl(), Resubmit(5))),
    Flow(3, 3, match({"eth_type": V4, "ct_state": TRACKED, "ct_nw_src": 1, "ct_nw_proto": 6, "ct_tp_dst": (8, 65528)})),
    Flow(3, 3, match({"eth_type": V6, "ct_state": TRACKED, "ct_ipv6_dst": 5}), (SetField("eth_dst", MAC), Output(7))),
    Flow(3, 4, match({"reg1": 1, "reg2": (0x80000000, 0x80000000), "reg15": 3}), (SetField("reg3", 1),), 250),
    Flow(
        4,
        1,
        match({"eth_type": ARP, "arp_op": 1, "arp_tpa": 0x01020304}),
        (
            Move("eth_src", "eth_dst"),
            SetField("eth_src", MAC),
            SetField("arp_op", 2),
            Move("arp_sha", "arp_tha"),
            Move("arp_spa", "arp_tpa"),
            SetField("arp_spa", 0x01020304),
            Output(OFPP_IN_PORT),
        ),
    ),
    Flow(
        4,
        2,
        match({"eth_type": V6, "ip_proto": 58, "icmpv6_type": 136}),
        (
            SetField("nd_options_type", 2),
            SetField("nd_tll", MAC),
            SetField("nd_reserved", 0xE0000000),
            Output(OFPP_IN_PORT),
        ),
    ),
    Flow(9, 0, ()),
    Flow(
        10,
        1,
        match({"eth_type": V4, "ip_proto": 6, "ct_state": TRACKED, "ct_nw_proto": 6}),
        (Move("ct_nw_proto", "reg7"), Move("ct_tp_dst", "reg8"), SetField("nw_ttl", 255), OutputRegister("reg4")),
    ),
    Flow(10, 2, match({"eth_type": V6, "nw_ttl": 254})),
    Flow(10, 3, match({"eth_type": ARP}), (Move("arp_tpa", "reg9"), Move("reg9", "arp_spa"))),
]


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    with running_switch(tmp_path / "ovs") as switch:
        for name in ("ours", "theirs"):
            switch.configure("add-br", name, "--", "set", "bridge", name, "datapath_type=netdev", "fail_mode=secure")
            switch.configure("set", "bridge", name, "protocols=OpenFlow13,OpenFlow14,OpenFlow15")
        yield switch


@pytest.fixture
def openflow(switch: Switch) -> Iterator[OpenFlow]:
    opened = OpenFlow(switch.management("ours"))
    yield opened
    opened.close()


def test_flows_are_what_ovs_ofctl_makes_of_their_words(switch: Switch, openflow: OpenFlow, tmp_path: Path) -> None:
    openflow.change(put=FLOWS)
    words = tmp_path / "flows"
    words.write_text("\n".join(f"cookie={OWNER:#x},{flow}" for flow in FLOWS))
    switch.flows("add-flows", "theirs", str(words))
    assert len(switch.dump_flows("ours")) == len(FLOWS)
    assert switch.dump_flows("ours") == switch.dump_flows("theirs")
    assert {each.flow for each in openflow.read_flows()} == set(FLOWS)


def test_a_change_is_made_whole_or_not_at_all(switch: Switch, openflow: OpenFlow) -> None:
    openflow.change(put=FLOWS[:2])
    before = switch.dump_flows("ours")
    broken = Flow(0, 1, match({"ip_src": 1}))
    with pytest.raises(DatapathFault, match=r"ip_src=0\.0\.0\.1.*refused"):
        openflow.change(drop=[FLOWS[0].key], put=[FLOWS[2], broken])
    assert switch.dump_flows("ours") == before
    openflow.change(drop=[FLOWS[0].key, FLOWS[5].key], put=[FLOWS[2]])
    assert {each.flow for each in openflow.read_flows()} == set(FLOWS[1:3])


def test_what_the_switch_has_taken_before_it_is_not_asked_about(switch: Switch, openflow: OpenFlow) -> None:
    """Flows of one shape are taken or refused alike; one of another shape is asked about, whatever is beside it."""
    known = Flow(1, 1, match({"eth_type": V4, "ip_proto": 6, "tcp_dst": 80}), (Output(9),))
    openflow.change(put=[known])
    another = Flow(1, 1, match({"eth_type": V4, "ip_proto": 6, "tcp_dst": 81}), (Output(8),))
    assert another.shape == known.shape
    openflow.change(put=[another])
    before = switch.dump_flows("ours")
    assert len(before) == 2
    for broken in (
        Flow(1, 1, match({"eth_type": V4, "ip_proto": 17, "tcp_dst": 82}), (Output(9),)),
        Flow(1, 1, match({"eth_type": V6, "ip_proto": 6, "ip_src": 1}), (Output(9),)),
        Flow(1, 1, match({"eth_type": V4, "ip_proto": 6, "tcp_dst": 83}), (Output(9),), 1, meter=5),
    ):
        assert broken.shape != known.shape
        with pytest.raises(DatapathFault, match="refused"):
            openflow.change(drop=[known.key], put=[another, broken])
        assert switch.dump_flows("ours") == before


def test_what_stands_by_is_given_to_a_switch_that_comes_back_without_flows(switch: Switch, openflow: OpenFlow) -> None:
    """W28: with the first words. One that has its flows keeps them as they are; one that stands by stands by once."""
    openflow.change(put=FLOWS)
    switch.kill_daemon()
    with pytest.raises(DatapathFault):
        openflow.poll()
    openflow.prepare_replay(FLOWS)
    switch.start_daemon()
    openflow.poll_and_replay(replay=True)
    assert (openflow.began_empty, openflow.is_refilled) == (True, True)
    assert {each.flow for each in openflow.read_flows()} == set(FLOWS)
    openflow.prepare_replay(FLOWS)
    openflow.change(drop=[FLOWS[0].key])
    openflow.close()
    openflow.poll_and_replay(replay=True)
    assert (openflow.began_empty, openflow.is_refilled) == (False, False)
    assert {each.flow for each in openflow.read_flows()} == set(FLOWS[1:])
    openflow.change(drop=[flow.key for flow in FLOWS])
    openflow.close()
    openflow.poll_and_replay(replay=True)
    assert (openflow.began_empty, openflow.is_refilled, openflow.count_flows()) == (True, False, 0)


@pytest.mark.parametrize("way", ["look", "change", "meters"])
def test_what_stands_by_is_given_to_nobody_who_did_not_ask_for_it(switch: Switch, openflow: OpenFlow, way: str) -> None:
    """W28: whoever else opens the connection may have more to tell; and nothing stands by any more then."""
    openflow.change(put=FLOWS)
    openflow.prepare_replay(FLOWS)
    switch.kill_daemon()
    switch.start_daemon()
    if way == "look":
        openflow.ensure_connected()
    elif way == "change":
        openflow.change(put=FLOWS[:1])
    else:
        openflow.put_meters([Meter(4, 6292, 1573)])
    assert not openflow.is_refilled
    assert openflow.count_flows() == (1 if way == "change" else 0)
    openflow.close()
    openflow.poll_and_replay(replay=True)
    assert not openflow.is_refilled


def test_a_shape_that_is_refused_after_all_is_asked_about_from_then_on(switch: Switch, openflow: OpenFlow) -> None:
    flow = Flow(1, 1, match({"eth_type": V4, "ip_src": 1}), (Output(9),))
    refused = Flow(1, 1, match({"eth_type": V4, "ip_src": 2}), (Output(0xFFFFFEFF),))
    assert flow.shape == refused.shape
    openflow.change(put=[flow])
    with pytest.raises(DatapathFault, match="refused"):
        openflow.change(put=[refused, Flow(1, 1, match({"eth_type": V4, "ip_src": 3}), (Output(9),))])
    before = switch.dump_flows("ours")
    with pytest.raises(DatapathFault, match="refused"):
        openflow.change(put=[refused, Flow(1, 1, match({"eth_type": V4, "ip_src": 4}), (Output(9),))])
    assert switch.dump_flows("ours") == before


@pytest.mark.parametrize("left", range(8))
def test_xids_wrap_around(switch: Switch, openflow: OpenFlow, left: int) -> None:
    openflow._xid = 0xFFFFFFFF - left
    openflow.change(put=FLOWS[:2])
    openflow._xid = 0xFFFFFFFF - left
    openflow.change(put=FLOWS[:2])
    assert len(switch.dump_flows("ours")) == 2


def test_what_a_switch_has_never_taken_does_not_stand_by(switch: Switch, openflow: OpenFlow) -> None:
    """Nor what needs a meter, which would have to be there first."""
    openflow.put_meters([Meter(4, 6292, 1573)])
    metered = Flow(1, 1, match({"in_port": 4}), (), 2, 4)
    openflow.change(put=[FLOWS[0], metered])
    for flows in ([FLOWS[0], FLOWS[1]], [FLOWS[0], metered]):
        openflow.prepare_replay(flows)
        switch.kill_daemon()
        with pytest.raises(DatapathFault):
            openflow.poll()
        switch.start_daemon()
        openflow.poll_and_replay(replay=True)
        assert (openflow.began_empty, openflow.is_refilled) == (True, False)
    openflow.change(put=FLOWS)
    assert {each.flow for each in openflow.read_flows()} == set(FLOWS)


def test_flows_of_others_are_not_seen_and_not_touched(switch: Switch, openflow: OpenFlow) -> None:
    switch.flows("add-flow", "ours", f"cookie=0x7,{FLOWS[0]}")
    openflow.change(put=FLOWS[1:3], drop=[FLOWS[0].key])
    assert {each.flow for each in openflow.read_flows()} == set(FLOWS[1:3])
    assert sum("cookie=0x7," in flow for flow in switch.dump_flows("ours")) == 1


def test_meters_are_put_altered_and_dropped_under_their_flows(switch: Switch, openflow: OpenFlow) -> None:
    """A meter that changes keeps its flows, and one that was lost takes them with it."""
    meters = [Meter(4, 6292, 1573), Meter(5, 1000, 1050)]
    flows = {Flow(1, 1, match({"in_port": each.number}), (), 2, each.number) for each in meters}
    openflow.put_meters(meters)
    openflow.change(put=flows)
    assert {*openflow.read_meters()} == {*meters}
    assert {each.flow for each in openflow.read_flows()} == flows
    assert "type=drop rate=6292 burst_size=1573" in switch.flows("dump-meters", "ours")
    openflow.put_meters([faster := Meter(4, 16778, 4194), meters[1]])
    assert {*openflow.read_meters()} == {faster, meters[1]}
    assert {each.flow for each in openflow.read_flows()} == flows
    switch.flows("mod-meter", "ours", "meter=4,pktps,band=type=drop,rate=9")
    switch.flows("del-meter", "ours", "meter=5")
    assert openflow.read_meters() == [Meter(4, 0, 0)]
    assert openflow.count_flows() == 1
    openflow.put_meters([faster])
    assert openflow.read_meters() == [faster]
    openflow.change(drop=[flow.key for flow in flows])
    openflow.drop_meters([4, 5])
    assert openflow.read_meters() == []


def test_many_flows_come_back_in_many_answers(openflow: OpenFlow) -> None:
    flows = {Flow(1, 7, match({"eth_type": V4, "ip_src": number}), (Output(1),)) for number in range(3000)}
    openflow.change(put=flows)
    assert {each.flow for each in openflow.read_flows()} == flows
    assert openflow.count_flows() == len(flows)


def test_a_switch_that_comes_back_is_spoken_to_again(switch: Switch, openflow: OpenFlow) -> None:
    """W28: its flows are gone; whoever counts connections knows."""
    openflow.change(put=FLOWS)
    switch.kill_daemon()
    with pytest.raises(DatapathFault):
        openflow.poll()
    with pytest.raises(DatapathFault):
        openflow.read_flows()
    switch.start_daemon()
    assert openflow.read_flows() == []
    openflow.change(put=FLOWS)
    assert {each.flow for each in openflow.read_flows()} == set(FLOWS)
    assert openflow.connect_count == 2


def test_connections_are_forgotten_by_their_ends_and_by_their_zone(switch: Switch, openflow: OpenFlow) -> None:
    """The switch is handed packets, and tells what it remembers of them."""
    here, there = parse_address("10.0.0.1", field="here"), parse_address("10.0.0.2", field="there")
    flow = Flow(0, 1, match({"eth_type": V4}), (SetField("reg0", 5), Ct("reg0", commit=True)))

    def connect() -> None:
        switch.flows("packet-out", "ours", f"in_port=LOCAL packet={PACKET} actions=table")

    def remembered() -> bool:
        return "10.0.0.1" in switch.command("dpctl/dump-conntrack", "zone=5")

    openflow.change(put=[flow])
    ways: list[Callable[[], None]] = [
        lambda: openflow.flush_connections([(5, here)]),
        lambda: openflow.flush_connections([(5, there)]),
        lambda: openflow.change(put=[flow], flush=[(5, there)]),
        lambda: openflow.change(flush=[(5, here)]),
        lambda: openflow.flush_zones([5]),
    ]
    for forget in ways:
        connect()
        assert remembered()
        openflow.flush_connections([(6, here), (6, there)])
        openflow.flush_zones([6])
        assert remembered()
        forget()
        assert not remembered()
