"""Parsers of what Open vSwitch sends: OpenFlow messages, OVSDB's JSON-RPC, control sockets, packet-ins, trace texts."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import msgspec
from tests.support.fuzz.engine import Parse, Target
from tests.support.fuzz.inputs import SEPARATOR, split, stream_of
from tests.support.fuzz.mutations import Form

from weft.adapters.ovs.control import unixctl
from weft.adapters.ovs.control.packet_in import decode_drop
from weft.adapters.ovs.control.stream import Stream
from weft.adapters.ovs.control.trace import parse_result
from weft.adapters.ovs.openflow import actions, constants
from weft.adapters.ovs.openflow.client import OpenFlow, PacketIn
from weft.adapters.ovs.openflow.fields import encode_match, match
from weft.adapters.ovs.openflow.flows import OWNER, Flow, add_flow, decode_flows, flows_request
from weft.adapters.ovs.openflow.meters import Meter, add_meter, decode_meters, meters_request
from weft.adapters.ovs.ovsdb.bridge import _COLUMNS, BRIDGE, TENANT_KEY, SwitchBridge, SwitchPort
from weft.adapters.ovs.ovsdb.client import Database
from weft.adapters.ovs.ovsdb.jsonrpc import Incoming
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName

_ERRORS = (DatapathFault,)
_FLOWS = (
    Flow(
        1,
        100,
        match({"eth_type": 0x800, "ip_src": (0x0A000000, 0xFF000000), "reg0": 7}),
        (actions.SetField("reg3", 9), actions.Ct("reg0", 5, True), actions.Output(4)),
        goto=7,
        meter=3,
    ),
    Flow(
        2,
        1,
        match({"in_port": 3}),
        (actions.Resubmit(9), actions.Move("eth_src", "eth_dst"), actions.OutputRegister("reg4")),
    ),
    Flow(3, 0, (), (actions.PushVlan(), actions.PopVlan(), actions.DecrementTtl())),
)


def _stats(flow: Flow) -> bytes:
    """A flow as the switch reports it: the same match and instructions behind another head."""
    rest = add_flow(flow)[40:]  # behind struct ofp_flow_mod
    head = struct.pack("!HBxIIHHHHH2xQQQ", 48 + len(rest), flow.table, 1, 2, flow.priority, 0, 0, 0, 0, OWNER, 5, 6)
    return head + rest


def _flow_stats() -> list[bytes]:
    return [_stats(flow) for flow in _FLOWS] + [b"".join(map(_stats, _FLOWS))]


def _message(kind: int, xid: int, body: bytes = b"", *, version: int = constants.OFP_VERSION) -> bytes:
    return struct.pack("!BBHI", version, kind, 8 + len(body), xid) + body


def _multipart(kind: int, xid: int, body: bytes, *, more: bool = False) -> bytes:
    return _message(constants.OFPT_MULTIPART_REPLY, xid, struct.pack("!HH4x", kind, more) + body)


# What the client does with the messages that follow; an input begins with the number of one.
def _operations() -> list[Callable[[OpenFlow, Stream], object]]:
    return [
        lambda client, stream: client._handshake(),
        lambda client, stream: [
            flow
            for part in client._request(stream, constants.OFPMP_FLOW, flows_request())
            for flow in decode_flows(part)
        ],
        lambda client, stream: [
            each
            for part in client._request(stream, constants.OFPMP_METER_CONFIG, meters_request())
            for each in decode_meters(part)
        ],
        lambda client, stream: client._count_flows(stream),
        lambda client, stream: client._commit(stream, _FLOWS, ()),
        lambda client, stream: client._drain(stream),
    ]


def _open_openflow() -> Parse:
    operations = _operations()

    def parse(data: bytes) -> object:
        with stream_of(data[1:]) as stream:
            client = OpenFlow("unix:fuzz")
            client._stream = stream
            operations[data[0] % len(operations) if data else 0](client, stream)
            return list(client._packet_ins)

    return parse


def _conversations() -> list[bytes]:
    aggregate = struct.pack("!QQI4x", 1, 2, 3)
    handshake = (
        _message(constants.OFPT_HELLO, 1, struct.pack("!HHI", 1, 8, 1 << 5))
        + _multipart(constants.OFPMP_DESC, 5, bytes(1056))
        + _multipart(constants.OFPMP_AGGREGATE, 6, aggregate)
        + _message(constants.OFPT_BARRIER_REPLY, 8)
    )
    error = _message(constants.OFPT_ERROR, 3, struct.pack("!HH", 5, 1) + bytes(8))
    packet_in = _message(constants.OFPT_PACKET_IN, 0, _packet_in())
    echo = _message(constants.OFPT_ECHO_REQUEST, 9, b"ping")
    flows = (
        _multipart(constants.OFPMP_FLOW, 1, _flow_stats()[3], more=True)
        + echo
        + _multipart(constants.OFPMP_FLOW, 1, _flow_stats()[0])
    )
    commit = (
        _message(constants.OFPT_BARRIER_REPLY, 5)
        + _message(constants.OFPT_BUNDLE_CONTROL, 6, struct.pack("!IHH", 1, 5, 3))
        + _message(constants.OFPT_BARRIER_REPLY, 7)
    )
    meters = _multipart(constants.OFPMP_METER_CONFIG, 1, _meters()[0])
    each = (
        handshake,
        flows,
        meters,
        _multipart(constants.OFPMP_AGGREGATE, 1, aggregate),
        commit,
        packet_in + echo + error,
    )
    return [bytes([number]) + data for number, data in enumerate(each)] + [b"\4" + error, b"\1" + packet_in + flows]


def _meters() -> list[bytes]:
    samples = []
    for meter in (Meter(5, 1000, 2000), Meter(6, 10, 20, is_of_packets=True)):
        body = add_meter(meter)
        samples.append(struct.pack("!H", len(body)) + body[2:])
    return [b"".join(samples), samples[0]]


def _packet_in() -> bytes:
    frame = bytes(12) + b"\x08\x00" + bytes.fromhex("450000200001000040110000") + b"\x0a\0\0\1\x0a\0\0\2\x04\xd2\0\x50"
    body = struct.pack("!IHBBQ", 0xFFFFFFFF, len(frame), 1, 0, OWNER)
    return body + encode_match(match({"in_port": 5, "reg0": 1, "reg3": 0x42, "reg4": 6})) + bytes(2) + frame


def _open_packet_in() -> Parse:
    blue = TenantName("blue")
    port = SwitchPort(name="wpa", row="", ofport=5, assigned_ofport=5, error="", external_ids={TENANT_KEY: blue})
    return lambda data: decode_drop(PacketIn(data, 1.0), {1: blue}, {5: port})


_UUID = "11111111-1111-1111-1111-11111111111"
_SCHEMA: dict[str, Any] = {
    "tables": {table: {"columns": {column: {} for column in columns}} for table, columns in _COLUMNS.items()}
}
_ROWS: dict[str, Any] = {
    "Open_vSwitch": {
        _UUID + "0": {
            "new": {
                "bridges": ["uuid", _UUID + "1"],
                "cur_cfg": 1,
                "next_cfg": 1,
                "other_config": ["map", []],
                "datapath_types": ["set", ["netdev"]],
            }
        }
    },
    "Bridge": {
        _UUID + "1": {
            "new": {
                "name": BRIDGE,
                "ports": ["set", [["uuid", _UUID + "2"]]],
                "external_ids": ["map", [["weft", ""]]],
                "datapath_type": "netdev",
                "fail_mode": "secure",
                "protocols": ["set", ["OpenFlow14"]],
                "flow_tables": ["map", []],
            }
        }
    },
    "Port": {
        _UUID + "2": {
            "new": {
                "name": "wpa",
                "interfaces": ["uuid", _UUID + "3"],
                "external_ids": ["map", [["weft", ""], ["iface-id", "wpa"]]],
            }
        }
    },
    "Interface": {
        _UUID + "3": {
            "new": {
                "name": "wpa",
                "ofport": 7,
                "ofport_request": 7,
                "error": ["set", []],
                "admin_state": "up",
                "ifindex": 5,
            }
        }
    },
}


def _rpc(**members: object) -> bytes:
    return msgspec.json.encode(members)


def _replies() -> list[bytes]:
    hello = _rpc(id=1, result=_SCHEMA, error=None) + _rpc(id=2, result=_ROWS, error=None)
    update = _rpc(method="update", params=[None, {"Port": {_UUID + "2": {"old": {}}}}], id=None)
    return [
        hello
        + _rpc(
            id=3,
            result=[{"uuid": ["uuid", _UUID + "9"]}, {"error": "constraint violation", "details": "x"}],
            error=None,
        ),
        hello + _rpc(method="echo", params=[], id="echo") + update + _rpc(id=3, result=[{}, {}], error=None),
        _rpc(id=1, result=None, error="unknown database"),
    ]


def _talk(data: bytes) -> object:
    """Handshake, a transaction and a look at the ports, with whatever the server says."""
    with stream_of(data) as stream:
        database = Database("unix:fuzz", columns=_COLUMNS)
        database._stream = stream
        database._handshake()
        number = database._send("transact", ["Open_vSwitch"])
        try:
            database._result_of(number, "transact")
        finally:
            _look(database)
        return database.tables


def _look(database: Database) -> None:
    """Read what the datapath reads from the copy of the tables, which needs no connection."""
    bridge = SwitchBridge(database)
    bridge._read_ports()
    assert bridge.find() is None or bridge.is_ours in (True, False)


def _read_rows(data: bytes) -> object:
    """Rows of the tables as the server reports them, in valid messages."""
    return _talk(
        _rpc(id=1, result=_SCHEMA, error=None)
        + b'{"id":2,"error":null,"result":'
        + data
        + b"}"
        + _rpc(id=3, result=[], error=None)
    )


def _read_pieces(data: bytes) -> object:
    """Messages that come in pieces: an input has the pieces with separators between them."""
    incoming, rest = Incoming(), data
    while rest:
        piece, rest = split(rest)
        incoming.feed(piece)
    return None


def _read_unixctl(data: bytes) -> object:
    with stream_of(data) as stream:
        return parse_result(unixctl._reply(stream, "ofproto/trace"))


_TRACE = (
    "Flow: tcp\n\nbridge\n 0. priority 1\n    ct(table=5)\n -> The forked pipeline will be"
    " resumed at table 5.\nFinal flow: tcp,reg0=0x1,reg3=0x42\n -> output port is 7\nDatapath actions: 7"
)

TARGETS = (
    Target(
        name="openflow-flows",
        open=lambda: lambda data: [str(each.flow) for each in decode_flows(data)],
        samples=_flow_stats,
        errors=_ERRORS,
        weight=2,
        words=(b"\xff\xff\0\x10\0\0\x23\x20\0\x23", b"\0\4\0\x18\0\0\0\0", b"\0\1\0\x08", b"\0\x19"),
    ),
    Target(
        name="openflow-meters",
        open=lambda: lambda data: list(decode_meters(data)),
        samples=_meters,
        errors=_ERRORS,
        weight=0.5,
    ),
    Target(name="openflow-client", open=_open_openflow, samples=_conversations, errors=_ERRORS, weight=0.7),
    Target(name="openflow-packet-in", open=_open_packet_in, samples=lambda: [_packet_in()], errors=_ERRORS),
    Target(
        name="ovsdb-client",
        open=lambda: _talk,
        samples=_replies,
        errors=_ERRORS,
        weight=0.3,
        words=(b'"id":2', b'"result":', b'"error":null', b'["uuid",', b'["set",[', b'["map",[', b"null", b"}{"),
    ),
    Target(
        name="ovsdb-rows",
        open=lambda: _read_rows,
        samples=lambda: [msgspec.json.encode(_ROWS)],
        errors=_ERRORS,
        form=Form.JSON,
        weight=0.3,
    ),
    Target(
        name="ovsdb-pieces",
        open=lambda: _read_pieces,
        errors=_ERRORS,
        weight=0.5,
        words=(SEPARATOR, b"}{", b"[[[["),
        samples=lambda: [each.replace(b"}{", b"}" + SEPARATOR + b"{") for each in _replies()],
    ),
    Target(
        name="ovs-unixctl",
        open=lambda: _read_unixctl,
        errors=_ERRORS,
        form=Form.JSON,
        weight=0.2,
        samples=lambda: [_rpc(id=0, result=_TRACE, error=None), _rpc(id=0, result=None, error="no such bridge")],
    ),
)
