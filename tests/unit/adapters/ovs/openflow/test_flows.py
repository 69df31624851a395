"""The OpenFlow codec: what is packed comes back, and noise is refused. The real switch judges it in tests/lab."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.ovs.openflow import actions
from weft.adapters.ovs.openflow.fields import (
    FIELDS,
    LATER_FRAGMENT,
    Field,
    Match,
    decode_match,
    encode_match,
    match,
)
from weft.adapters.ovs.openflow.flows import OWNER, Flow, add_flow, decode_flows
from weft.domain.errors import DatapathFault


def numbers(field: Field) -> st.SearchStrategy[int]:
    return st.integers(0, field.exact_mask)


CONDITIONS = st.sampled_from(sorted(FIELDS)).flatmap(
    lambda name: st.tuples(
        st.just(name), numbers(FIELDS[name]) | st.tuples(numbers(FIELDS[name]), numbers(FIELDS[name]))
    )
)
MATCHES: st.SearchStrategy[Match] = st.lists(CONDITIONS, max_size=5).map(lambda found: match(dict(found)))
MOVABLE = [
    ("eth_src", "eth_dst"),
    ("ip_src", "ip_dst"),
    ("arp_sha", "arp_tha"),
    ("ipv6_dst", "ipv6_src"),
    ("ct_tp_dst", "reg3"),
]
TABLES = st.integers(0, 253)
ACTIONS: st.SearchStrategy[actions.Action] = st.one_of(
    st.integers(0, 0xFFFFFFFF).map(actions.Output),
    st.sampled_from(sorted(FIELDS)).flatmap(
        lambda name: st.builds(actions.SetField, st.just(name), numbers(FIELDS[name]))
    ),
    st.sampled_from(MOVABLE).map(lambda pair: actions.Move(*pair)),
    st.just(actions.DecrementTtl()),
    st.just(actions.PushVlan()),
    st.just(actions.PopVlan()),
    st.just(actions.OutputRegister("reg4")),
    TABLES.map(actions.Resubmit),
    st.builds(actions.Ct, st.sampled_from(["reg0", "reg7"]), st.none() | TABLES, st.booleans()),
)
FLOWS = st.builds(
    Flow,
    TABLES,
    st.integers(0, 0xFFFF),
    MATCHES,
    st.lists(ACTIONS, max_size=4).map(tuple),
    st.none() | TABLES,
    st.integers(0, 0xFFFF),
)

_STATS = struct.Struct("!HBxIIHHHHH2xQQQ")
_MOD_SIZE = 40


def told_by_switch(flow: Flow, packets: int) -> bytes:
    """A flow as a switch tells it: match and instructions are those of the message that put it."""
    rest = add_flow(flow)[_MOD_SIZE:]
    head = _STATS.pack(_STATS.size + len(rest), flow.table, 0, 0, flow.priority, 0, 0, 0, 0, OWNER, packets, 0)
    return head + rest


@given(st.lists(FLOWS, max_size=4))
def test_flows_come_back_as_they_were_put(flows: list[Flow]) -> None:
    found = [*decode_flows(b"".join(told_by_switch(flow, 7) for flow in flows))]
    assert [(each.flow, each.cookie, each.packets) for each in found] == [(flow, OWNER, 7) for flow in flows]


@given(MATCHES)
def test_matches_take_whole_words(conditions: Match) -> None:
    data = encode_match(conditions)
    assert len(data) % 8 == 0
    assert decode_match(data + b"more") == (conditions, len(data))


@given(FLOWS, st.data())
def test_a_cut_or_changed_answer_is_read_or_refused(flow: Flow, data: st.DataObject) -> None:
    wire = bytearray(told_by_switch(flow, 1))
    wire[data.draw(st.integers(0, len(wire) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(wire)))
    try:
        assert all(str(each.flow) for each in decode_flows(bytes(wire[:cut])))
    except DatapathFault as fault:
        assert fault.message.startswith("openflow: ")


@given(st.binary(max_size=120))
def test_noise_is_read_or_refused(noise: bytes) -> None:
    try:
        [*decode_flows(noise)]
    except DatapathFault as fault:
        assert fault.message.startswith("openflow: ")


def test_an_action_of_others_is_never_taken_for_ours() -> None:
    foreign = struct.pack("!HHIHHB3x", 0xFFFF, 16, 0x2320, 14, 3, 9)  # resubmit(3,9): as if it came by another port
    (found,) = actions.decode_actions(foreign)
    assert found == actions.Unknown(foreign)


@pytest.mark.parametrize(
    ("flow", "words"),
    [
        (Flow(0, 1, ()), "table=0,priority=1,actions=drop"),
        (
            Flow(3, 9, match({"eth_type": 0x800, "ip_dst": (0x0A000000, 0xFF000000), "reg0": 5}), (), 4),
            "table=3,priority=9,eth_type=0x800,ip_dst=10.0.0.0/255.0.0.0,reg0=0x5,actions=goto_table:4",
        ),
        (
            Flow(6, 4, match({"eth_type": 0x800, "ip_frag": LATER_FRAGMENT})),
            "table=6,priority=4,eth_type=0x800,ip_frag=later,actions=drop",
        ),
        (Flow(0, 1, (), (actions.Output(3),), None, 7), "table=0,priority=1,actions=meter:7,output:3"),
        (Flow(0, 1, match({"reg1": (1, 0)}), (actions.Output(3),)), "table=0,priority=1,actions=output:3"),
    ],
)
def test_a_flow_is_told_as_ovs_ofctl_reads_it(flow: Flow, words: str) -> None:
    assert str(flow) == words
