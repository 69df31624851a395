"""Requests to ofproto/trace, and its parsed output."""

from __future__ import annotations

from weft.adapters.ovs.control.trace import TraceResult, encode_packet, parse_result, resume_after_ct
from weft.domain.addresses import Address
from weft.domain.desired.state import Port
from weft.domain.ids import TenantName
from weft.domain.policy.model.protocols import ICMPV6, TCP
from weft.ports.datapath import TraceRequest

A, B = Address(4, 0x0A010001), Address(4, 0x0A010002)
PORT = Port(TenantName("blue"), "wpa", "02:00:00:00:00:01", (A,))
WEB = TraceRequest(port=PORT, source=A, target=B, protocol=TCP, target_port=80)

BEFORE_CT = """\
 4. ip, priority 1, cookie 0x7765667400000000
    ct(table=5,zone=NXM_NX_REG0[0..15])
     -> A clone of the packet is forked to recirculate. The forked pipeline will be resumed at table 5.

Final flow: tcp,reg0=0x1,reg5=0x1,in_port=2,nw_src=10.1.0.1
Datapath actions: ct(zone=1),recirc(0x1)

Final flow: recirc_id=0x1,ct_state=new|trk,tcp,reg0=0x1,reg3=0xf0000005,in_port=2
"""
ALLOWED = "    output:NXM_NX_REG4[]\n     -> output port is 3\n\nFinal flow: tcp,reg0=0x1,reg4=0x3\n"
DENIED = " 9. reg0=0x1\n    CONTROLLER:128\n\nFinal flow: tcp,reg0=0x1,reg3=0x80000004\nDatapath actions: drop\n"
NO_ROUTE = " 5. No match.\n    drop\n\nFinal flow: unchanged\nDatapath actions: drop\n"


def test_a_packet_is_encoded_in_flow_syntax() -> None:
    packet = encode_packet(WEB, in_port=2, target_mac="ee:ee:ee:ee:ee:ee")
    for word in ("in_port=2", "ip", "nw_src=10.1.0.1", "nw_dst=10.1.0.2", "tcp_dst=80"):
        assert word in packet.split(",")
    six = Address(6, 1)
    ping = TraceRequest(port=PORT, source=six, target=six, protocol=ICMPV6)
    words = encode_packet(ping, in_port=2, target_mac="ee:ee:ee:ee:ee:ee").split(",")
    assert {"ipv6", "ipv6_dst=::1", "icmpv6_type=128"} <= set(words)


def test_the_trace_resumes_behind_conntrack() -> None:
    resumed = resume_after_ct(BEFORE_CT, WEB, "tcp")
    assert resumed is not None
    packet, action = resumed
    assert action == "resubmit(,5)"
    words = set(packet.split(","))
    assert {"reg0=0x1", "reg5=0x1", "ct_zone=1", "ct_nw_src=10.1.0.1", "ct_nw_proto=6", "ct_tp_dst=80"} <= words
    assert not any(word.startswith("reg3") for word in words)
    assert resume_after_ct(NO_ROUTE, WEB, "tcp") is None


def test_trace_output_is_parsed() -> None:
    assert parse_result(ALLOWED) == TraceResult(3, 0)
    assert parse_result(DENIED) == TraceResult(0, 0x80000004)
    assert parse_result(NO_ROUTE) == TraceResult(0, 0)
