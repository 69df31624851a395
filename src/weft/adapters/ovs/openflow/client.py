"""An OpenFlow 1.4 connection to a bridge: change flows atomically in bundles, read flows and meters, flush conntrack.

A bundle is atomic: a packet sees the flows before it or after it, never a part. Calls block with deadlines. A lost
connection is opened again by the next call; `connect_count` counts the connections.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from weft.adapters.ovs.control.connection import Connection
from weft.adapters.ovs.control.stream import DEADLINE, Stream
from weft.adapters.ovs.openflow.actions import PACKET_IN_BYTES, Output, encode_actions
from weft.adapters.ovs.openflow.constants import (
    NX_VENDOR_ID,
    NXT_CT_FLUSH,
    NXT_CT_ORIG_TUPLE,
    NXT_CT_TUPLE_DST,
    NXT_CT_TUPLE_SRC,
    NXT_CT_ZONE_ID,
    OFP_NO_BUFFER,
    OFP_VERSION,
    OFPBCT_COMMIT_REQUEST,
    OFPBCT_DISCARD_REQUEST,
    OFPBCT_OPEN_REQUEST,
    OFPBF_ATOMIC,
    OFPBF_ORDERED,
    OFPHET_VERSIONBITMAP,
    OFPM_CONTROLLER,
    OFPMP_AGGREGATE,
    OFPMP_DESC,
    OFPMP_FLOW,
    OFPMP_METER_CONFIG,
    OFPMPF_REPLY_MORE,
    OFPP_NORMAL,
    OFPT_BARRIER_REPLY,
    OFPT_BARRIER_REQUEST,
    OFPT_BUNDLE_ADD_MESSAGE,
    OFPT_BUNDLE_CONTROL,
    OFPT_ECHO_REPLY,
    OFPT_ECHO_REQUEST,
    OFPT_ERROR,
    OFPT_EXPERIMENTER,
    OFPT_FLOW_MOD,
    OFPT_HELLO,
    OFPT_METER_MOD,
    OFPT_MULTIPART_REPLY,
    OFPT_MULTIPART_REQUEST,
    OFPT_PACKET_IN,
    OFPT_PACKET_OUT,
    OFPT_SET_CONFIG,
)
from weft.adapters.ovs.openflow.fields import unpack
from weft.adapters.ovs.openflow.flows import (
    Flow,
    FlowCount,
    FlowKey,
    add_flow,
    decode_flows,
    delete_flow,
    flows_request,
)
from weft.adapters.ovs.openflow.meters import (
    Meter,
    add_meter,
    decode_meters,
    delete_meter,
    meters_request,
    modify_meter,
)
from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault

_HEADER = struct.Struct("!BBHI")
_PACKET_OUT_STRUCT = struct.Struct("!IIH6x")
_HELLO_BODY = struct.pack("!HHI", OFPHET_VERSIONBITMAP, 8, 1 << OFP_VERSION)
_BUNDLE_STRUCT = struct.Struct("!IHH")
_ATOMIC_ORDERED = OFPBF_ATOMIC | OFPBF_ORDERED
_MULTIPART_STRUCT = struct.Struct("!HH4x")
_AGGREGATE_STRUCT = struct.Struct("!QQI4x")
_ERROR_STRUCT = struct.Struct("!HH")
_CONFIG_STRUCT = struct.Struct("!HH")
# OVS' controller meter limits packet-ins: each costs the switch an upcall and us a wake-up.
_PACKET_IN_METER = Meter(OFPM_CONTROLLER, rate=200, burst=100, is_of_packets=True)
_MAX_QUEUED_PACKET_INS = 1000
_XID_MASK = 0xFFFFFFFF
_FLUSH_STRUCT = struct.Struct("!IIB7x")
_TUPLE_STRUCT = struct.Struct("!HH4xHH16s4x")
_ZONE_STRUCT = struct.Struct("!HHHxx")
# NXT_CT_FLUSH carries IPv4 addresses as IPv4-mapped IPv6 ones (RFC 4291 2.5.5.2).
_IPV4_MAPPED = 0xFFFF << 32


# A conntrack zone and an address in it.
ZonedAddress = tuple[int, Address]


class Message(NamedTuple):
    kind: int
    xid: int
    body: bytes


class PacketIn(NamedTuple):
    """The body of an OFPT_PACKET_IN, and when it arrived, in seconds since the epoch."""

    body: bytes
    at: float


class OpenFlow(Connection):
    """A connection, opened by its first use."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._buffer = bytearray()
        self._xid = 0
        self._packet_ins: deque[PacketIn] = deque(maxlen=_MAX_QUEUED_PACKET_INS)
        # Shapes of flows that this version of the switch has accepted, over its restarts.
        self._accepted_shapes: set[object] = set()
        self._description = b""
        self._replay: Sequence[bytes] = ()
        self._may_replay = False
        # Whether the switch had none of our flows when the connection was opened.
        self.began_empty = False
        # Whether the handshake installed the prepared flows.
        self.is_refilled = False

    def prepare_replay(self, flows: Collection[Flow]) -> None:
        """Encode the flows that `poll_and_replay` installs in a restarted switch.

        Only flows of accepted shapes and without meters: a refused flow or a missing meter would cost a round trip.
        """
        replayable = all(flow.shape in self._accepted_shapes and not flow.meter for flow in flows)
        self._replay = [*map(add_flow, flows)] if replayable else ()

    def poll_and_replay(self, *, replay: bool) -> None:
        """Poll; with `replay`, install the prepared flows in the handshake with a switch that restarted empty.

        Every reconnection discards the prepared flows: they may be stale by the next one.
        """
        self._may_replay = replay
        try:
            self.poll()
        finally:
            self._may_replay = False

    def change(
        self, *, drop: Iterable[FlowKey] = (), put: Iterable[Flow] = (), flush: Iterable[ZonedAddress] = ()
    ) -> None:
        """Delete and add flows in one bundle, then flush conntrack; `DatapathFault` names the flow that OVS refuses.

        When the connection is lost meanwhile, the result is unknown.
        """
        changes: list[Flow | FlowKey] = [*drop, *put]
        self._replay = ()  # stale from now on
        if not changes:
            self.flush_connections(flush)
            return
        self.ensure_connected()
        flushes = [*_flushes(flush)]
        self._close_on_fault(lambda stream: self._commit(stream, changes, flushes))

    def read_flows(self) -> list[FlowCount]:
        """Read all of our flows."""
        self.ensure_connected()
        flows = self._close_on_fault(
            lambda stream: [
                flow for part in self._request(stream, OFPMP_FLOW, flows_request()) for flow in decode_flows(part)
            ]
        )
        self._accepted_shapes = self._accepted_shapes or {each.flow.shape for each in flows}
        return flows

    def count_flows(self) -> int:
        """Return how many of our flows the switch has."""
        self.ensure_connected()
        return self._close_on_fault(self._count_flows)

    def wait_for_main_loop(self) -> None:
        """Return when ovs-vswitchd has processed the netlink notifications that were pending at the call."""
        with self.main_loop_barrier():
            pass

    @contextmanager
    def main_loop_barrier(self) -> Iterator[None]:
        """Do the same while the block runs: at its end, notifications from before it are processed."""
        # In one iteration of its main loop ovs-vswitchd serves OpenFlow twice, before and after it reconfigures ports,
        # and reads netlink only at the end. So one barrier reply proves nothing; the second one does.
        self.ensure_connected()
        self._close_on_fault(lambda stream: self._send_all(stream, ()))
        first, done = self._close_on_fault(lambda stream: self._post(stream, ()))
        yield
        self._close_on_fault(lambda stream: self._reply(stream, OFPT_BARRIER_REPLY, done, since=first))

    def take_packet_ins(self) -> list[PacketIn]:
        """Return the packet-ins since the last call, oldest first; a sample when there are many."""
        self.ensure_connected()
        packet_ins = [*self._packet_ins]
        self._packet_ins.clear()
        return packet_ins

    def flush_connections(self, zoned: Iterable[ZonedAddress]) -> None:
        """Delete the conntrack entries of addresses in zones, at either end. Needs Open vSwitch 3.1 or newer."""
        self._execute(OFPT_EXPERIMENTER, [*_flushes(zoned)])

    def flush_zones(self, zones: Iterable[int]) -> None:
        """Delete all conntrack entries of these zones."""
        header = _FLUSH_STRUCT.pack(NX_VENDOR_ID, NXT_CT_FLUSH, 0)
        properties = (_ZONE_STRUCT.pack(NXT_CT_ZONE_ID, _ZONE_STRUCT.size, zone) for zone in zones)
        self._execute(OFPT_EXPERIMENTER, [header + each for each in properties])

    def read_meters(self) -> list[Meter]:
        """Read all meters of the bridge."""
        self.ensure_connected()
        return self._close_on_fault(
            lambda stream: [
                meter
                for part in self._request(stream, OFPMP_METER_CONFIG, meters_request())
                for meter in decode_meters(part)
            ]
        )

    def put_meters(self, meters: Collection[Meter]) -> None:
        """Add or modify meters; flows that refer to a modified one stay."""
        if meters:
            found = {meter.number: meter for meter in self.read_meters()}
            known = [modify_meter(meter) for meter in meters if found.get(meter.number, meter) != meter]
            self._execute(
                OFPT_METER_MOD, [*known, *(add_meter(meter) for meter in meters if meter.number not in found)]
            )

    def drop_meters(self, numbers: Iterable[int]) -> None:
        """Delete meters. Delete the flows that refer to them first: OVS would delete those too."""
        self._execute(OFPT_METER_MOD, [*map(delete_meter, numbers)])

    def send(self, frames: Iterable[bytes], *, port: int) -> None:
        """Send frames with OFPP_NORMAL, as if received on `port`."""
        actions = encode_actions([Output(OFPP_NORMAL)])
        head = _PACKET_OUT_STRUCT.pack(OFP_NO_BUFFER, port, len(actions)) + actions
        self._execute(OFPT_PACKET_OUT, [head + frame for frame in frames])

    def _execute(self, kind: int, bodies: Sequence[bytes]) -> None:
        """Send messages of one type and wait until the switch has processed them."""
        if bodies:
            self.ensure_connected()
            self._close_on_fault(lambda stream: self._send_all(stream, [(kind, body) for body in bodies]))

    def _drain(self, stream: Stream) -> None:
        # Read to the end: a closed connection shows only after the queued data.
        while data := stream.receive_available():
            for _ in self._take(stream, data):
                pass  # a reply to a request that was given up; packet-ins are queued by `_take`

    def _handshake(self) -> None:
        self._buffer = bytearray()
        self._close_on_fault(self._negotiate)

    def _negotiate(self, stream: Stream) -> None:
        """Exchange hellos, limit packet-ins, read the description and the flow count, and replay flows."""
        # One write for all of it: a switch that has just started takes long for each turn. The replayed flows travel
        # in an open bundle, which is committed only when the description shows the same version and no flows.
        replay, self._replay = self._replay if self._may_replay else (), ()
        stream.send(_pack(OFPT_HELLO, self._next_xid(), _HELLO_BODY))
        greeting = (
            (OFPT_METER_MOD, delete_meter(_PACKET_IN_METER.number)),
            (OFPT_METER_MOD, add_meter(_PACKET_IN_METER)),
            (OFPT_SET_CONFIG, _CONFIG_STRUCT.pack(0, PACKET_IN_BYTES)),
            (OFPT_MULTIPART_REQUEST, _MULTIPART_STRUCT.pack(OFPMP_DESC, 0)),
            (OFPT_MULTIPART_REQUEST, _MULTIPART_STRUCT.pack(OFPMP_AGGREGATE, 0) + flows_request()),
        )
        xids = [self._next_xid() for _ in greeting]
        wire = [_pack(kind, xid, body) for xid, (kind, body) in zip(xids, greeting, strict=True)]
        bundle = self._next_xid()
        wire += self._bundle(bundle, replay) if replay else ()
        wire.append(_pack(OFPT_BARRIER_REQUEST, done := self._next_xid(), b""))
        stream.send(b"".join(wire))
        if next(self._messages(stream)).kind != OFPT_HELLO:
            raise DatapathFault(f"{self.address}: peer does not support OpenFlow 1.4")
        described = self._reply(stream, OFPT_MULTIPART_REPLY, xids[-2], since=xids[0])
        aggregate = self._reply(stream, OFPT_MULTIPART_REPLY, xids[-1])
        self.began_empty = not _flow_count(aggregate[_MULTIPART_STRUCT.size :])
        self._reply(stream, OFPT_BARRIER_REPLY, done, since=bundle)
        is_same, self._description = described == self._description, described
        if not is_same:  # another version may refuse what this one accepted
            self._accepted_shapes.clear()
        self.is_refilled = bool(replay) and is_same and self.began_empty
        if replay:
            end = OFPBCT_COMMIT_REQUEST if self.is_refilled else OFPBCT_DISCARD_REQUEST
            self._send_all(stream, [(OFPT_BUNDLE_CONTROL, _BUNDLE_STRUCT.pack(bundle, end, _ATOMIC_ORDERED))])

    def _bundle(self, bundle: int, bodies: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the messages that open a bundle and add flow mods to it."""
        yield _pack(OFPT_BUNDLE_CONTROL, bundle, _BUNDLE_STRUCT.pack(bundle, OFPBCT_OPEN_REQUEST, _ATOMIC_ORDERED))
        for body in bodies:
            xid = self._next_xid()
            inner = _pack(OFPT_FLOW_MOD, xid, body)
            yield _pack(OFPT_BUNDLE_ADD_MESSAGE, xid, _BUNDLE_STRUCT.pack(bundle, 0, _ATOMIC_ORDERED) + inner)

    def _commit(self, stream: Stream, changes: Sequence[Flow | FlowKey], flushes: Sequence[bytes]) -> None:
        """Send the changes as one bundle and commit it, then flush conntrack."""
        # OVS leaves a refused flow mod out of the bundle and commits the rest. So wait for a barrier before the commit,
        # unless OVS has accepted flows of all these shapes before: that saves one iteration of its main loop.
        # Messages are processed in order, so the flushes see the new flows.
        shapes = {each.shape for each in changes if isinstance(each, Flow)}
        is_known = shapes <= self._accepted_shapes
        self._accepted_shapes -= shapes  # added again below, unless one is refused after all
        bundle = self._next_xid()
        bodies = (add_flow(each) if isinstance(each, Flow) else delete_flow(each) for each in changes)
        wire = [*self._bundle(bundle, bodies)]
        if not is_known:
            wire.append(_pack(OFPT_BARRIER_REQUEST, collected := self._next_xid(), b""))
            stream.send(b"".join(wire))
            wire.clear()
            self._reply(stream, OFPT_BARRIER_REPLY, collected, since=bundle, changes=changes)
        wire.append(
            _pack(
                OFPT_BUNDLE_CONTROL,
                committed := self._next_xid(),
                _BUNDLE_STRUCT.pack(bundle, OFPBCT_COMMIT_REQUEST, _ATOMIC_ORDERED),
            )
        )
        wire += [_pack(OFPT_EXPERIMENTER, self._next_xid(), each) for each in flushes]
        wire.append(_pack(OFPT_BARRIER_REQUEST, done := self._next_xid(), b""))
        stream.send(b"".join(wire))
        self._reply(stream, OFPT_BUNDLE_CONTROL, committed, since=bundle, changes=changes)
        self._reply(stream, OFPT_BARRIER_REPLY, done, since=committed)
        self._accepted_shapes |= shapes

    def _send_all(self, stream: Stream, messages: Iterable[tuple[int, bytes]]) -> None:
        """Send messages and wait until the switch has processed them."""
        first, done = self._post(stream, messages)
        self._reply(stream, OFPT_BARRIER_REPLY, done, since=first)

    def _post(self, stream: Stream, messages: Iterable[tuple[int, bytes]]) -> tuple[int, int]:
        """Send messages and a barrier; return the xid of the first message and of the barrier."""
        first = self._xid + 1
        wire = [_pack(kind, self._next_xid(), body) for kind, body in messages]
        wire.append(_pack(OFPT_BARRIER_REQUEST, done := self._next_xid(), b""))
        stream.send(b"".join(wire))
        return first, done

    def _count_flows(self, stream: Stream) -> int:
        return _flow_count(b"".join(self._request(stream, OFPMP_AGGREGATE, flows_request())))

    def _request(self, stream: Stream, kind: int, question: bytes) -> Iterator[bytes]:
        """Send a multipart request and yield the bodies of its replies."""
        xid = self._next_xid()
        stream.send(_pack(OFPT_MULTIPART_REQUEST, xid, _MULTIPART_STRUCT.pack(kind, 0) + question))
        while True:
            body = self._reply(stream, OFPT_MULTIPART_REPLY, xid)
            _, flags = unpack(_MULTIPART_STRUCT, body)
            yield body[_MULTIPART_STRUCT.size :]
            if not flags & OFPMPF_REPLY_MORE:
                return

    def _reply(
        self, stream: Stream, kind: int, xid: int, *, since: int | None = None, changes: Sequence[Flow | FlowKey] = ()
    ) -> bytes:
        """Return the body of the reply to `xid`; `DatapathFault` when an error for a message since `since` comes first.

        `changes` are the flow mods sent after the message `since`, to name the one that OVS refused.
        """
        first = xid if since is None else since
        for message in self._messages(stream):
            position = message.xid - first & _XID_MASK
            if message.kind == OFPT_ERROR and position <= xid - first & _XID_MASK:
                subject = str(changes[position - 1]) if 0 < position <= len(changes) else "a request"
                raise _openflow_error(message, subject)
            if message.xid == xid and message.kind == kind:
                return message.body
        raise AssertionError("unreachable: _messages ends only by raising")

    def _messages(self, stream: Stream) -> Iterator[Message]:
        """Yield messages until one overall deadline."""
        until = time.monotonic() + DEADLINE
        yield from self._take(stream, b"")
        while True:
            yield from self._take(stream, stream.receive(until=until))

    def _take(self, stream: Stream, data: bytes) -> Iterator[Message]:
        """Yield the messages that these bytes complete; answer echo requests and queue packet-ins here."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            version, kind, length, xid = _HEADER.unpack_from(self._buffer)
            if length < _HEADER.size or (version != OFP_VERSION and kind not in {OFPT_HELLO, OFPT_ERROR}):
                raise DatapathFault(f"{self.address}: bad OpenFlow 1.4 message header")
            if len(self._buffer) < length:
                return
            body = bytes(self._buffer[_HEADER.size : length])
            del self._buffer[:length]  # of a bytearray: it moves no bytes, however many messages are queued
            if kind == OFPT_ECHO_REQUEST:
                stream.send(_pack(OFPT_ECHO_REPLY, xid, body))
            elif kind == OFPT_PACKET_IN:
                self._packet_ins.append(PacketIn(body, time.time()))
            else:
                yield Message(kind, xid, body)

    def _next_xid(self) -> int:
        self._xid = self._xid + 1 & _XID_MASK
        return self._xid


def _pack(kind: int, xid: int, body: bytes) -> bytes:
    return _HEADER.pack(OFP_VERSION, kind, _HEADER.size + len(body), xid) + body


def _flow_count(body: bytes) -> int:
    """Decode the flow count of an aggregate statistics reply."""
    return unpack(_AGGREGATE_STRUCT, body)[2]


def _flushes(zoned: Iterable[ZonedAddress]) -> Iterator[bytes]:
    return (_flush(zone, end, address) for zone, address in zoned for end in (NXT_CT_TUPLE_SRC, NXT_CT_TUPLE_DST))


def _flush(zone: int, end: int, address: Address) -> bytes:
    """Encode NXT_CT_FLUSH for connections with an address at one end of the original tuple."""
    value = address.number | (_IPV4_MAPPED if address.family == 4 else 0)
    ends = _TUPLE_STRUCT.pack(NXT_CT_ORIG_TUPLE, _TUPLE_STRUCT.size, end, 20, value.to_bytes(16, "big"))
    return (
        _FLUSH_STRUCT.pack(NX_VENDOR_ID, NXT_CT_FLUSH, 0)
        + ends
        + _ZONE_STRUCT.pack(NXT_CT_ZONE_ID, _ZONE_STRUCT.size, zone)
    )


def _openflow_error(message: Message, subject: str) -> DatapathFault:
    kind, code = unpack(_ERROR_STRUCT, message.body)
    return DatapathFault(f"openflow: {subject}: refused with OFPT_ERROR type {kind} code {code}")
