"""A connection to a bridge by OpenFlow 1.4: flows changed all at once (a bundle), and read back.

A bundle is atomic: a packet meets the flows of before it or of after it, never a half. The connection blocks with
deadlines, and is opened anew by the next call when it was lost; `connections` counts how often that was.
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
from weft.adapters.ovs.openflow.actions import NORMAL, TOLD_BYTES, Output, encode_actions
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
    alter_meter,
    decode_meters,
    delete_meter,
    meters_request,
)
from weft.domain.addresses import Address
from weft.domain.errors import DatapathFault

_VERSION = 5
_HEADER = struct.Struct("!BBHI")
_HELLO, _ERROR, _ECHO, _ECHO_REPLY, _SET_CONFIG, _PACKET_IN, _FLOW_MOD, _METER_MOD = 0, 1, 2, 3, 9, 10, 14, 29
_PACKET_OUT = 13
_PACKET_OUT_FORM, _NO_BUFFER = struct.Struct("!IIH6x"), 0xFFFFFFFF
_MULTIPART, _MULTIPART_REPLY, _BARRIER, _BARRIER_REPLY, _BUNDLE, _BUNDLE_ADD = 18, 19, 20, 21, 33, 34
_HELLO_BODY = struct.pack("!HHI", 1, 8, 1 << _VERSION)
_BUNDLE_FORM = struct.Struct("!IHH")
_OPEN, _COMMIT, _DISCARD = 0, 4, 6
_ATOMIC_ORDERED = 3
_MULTIPART_FORM = struct.Struct("!HH4x")
_DESCRIPTION, _FLOWS, _TOTALS, _METERS, _MORE = 0, 1, 2, 10, 1
_TOTALS_FORM = struct.Struct("!QQI4x")
_ERROR_FORM = struct.Struct("!HH")
_CONFIG_FORM = struct.Struct("!HH")
# The switch's own meter for what it tells: packets beyond it are not told.
_TELLING_METER = Meter(0xFFFFFFFD, rate=200, burst=100, is_of_packets=True)
_TOLD_WAITING = 1000
_NUMBER_MASK = 0xFFFFFFFF
_EXPERIMENTER, _NICIRA, _FLUSH = 4, 0x2320, 32
_FLUSH_FORM = struct.Struct("!IIB7x")
_TUPLE_FORM = struct.Struct("!HH4xHH16s4x")
_ZONE_FORM = struct.Struct("!HHHxx")
_FIRST_DIRECTION, _ZONE = 0, 2
_SOURCE, _TARGET = 0, 1
# What makes an IPv6 address of an IPv4 one.
_MAPPED = 0xFFFF << 32


# An address in a zone of the connection tracker.
Zoned = tuple[int, Address]


class Message(NamedTuple):
    kind: int
    number: int
    body: bytes


class PacketIn(NamedTuple):
    """The body of a message about a packet, and when it came in, in seconds since the epoch."""

    body: bytes
    at: float


class OpenFlow(Connection):
    """A connection, opened by its first use."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._waiting = b""
        self._number = 0
        self._told: deque[PacketIn] = deque(maxlen=_TOLD_WAITING)
        # The forms of flows that this switch has taken, whatever it has been started since.
        self._taken: set[object] = set()
        self._described = b""
        self._standby: Sequence[bytes] = ()
        self._refills = False
        # Whether the switch had no flows of ours when the connection was opened.
        self.began_empty = False
        # Whether it was given those that stood by.
        self.is_refilled = False

    def stand_by(self, flows: Collection[Flow]) -> None:
        """Have flows ready for `look_anew`.

        Only what such a switch has taken before, and without meters, which it would have to be given first.
        """
        fitting = all(flow.form in self._taken and not flow.meter for flow in flows)
        self._standby = [*map(add_flow, flows)] if fitting else ()

    def look_anew(self, *, refill: bool) -> None:
        """As `look`. A switch that is back without flows is given those that stand by with the greeting, if asked to.

        Nothing stands by any more when it is back, whatever it was opened for.
        """
        self._refills = refill
        try:
            self.look()
        finally:
            self._refills = False

    def change(self, *, drop: Iterable[FlowKey] = (), put: Iterable[Flow] = (), forget: Iterable[Zoned] = ()) -> None:
        """Take flows of ours away and put others, all at once; `DatapathFault` names what the switch refuses.

        Then connections are forgotten as by `forget_connections`. When the connection to the switch is lost meanwhile
        nobody knows whether it was done.
        """
        told: list[Flow | FlowKey] = [*drop, *put]
        self._standby = ()  # it would be of before
        if not told:
            self.forget_connections(forget)
            return
        self.look_alive()
        flushes = [*_flushes(forget)]
        self._guarded(lambda stream: self._commit(stream, told, flushes))

    def read_flows(self) -> list[FlowCount]:
        """Every flow of ours that the switch has."""
        self.look_alive()
        flows = self._guarded(
            lambda stream: [flow for part in self._ask(stream, _FLOWS, flows_request()) for flow in decode_flows(part)]
        )
        self._taken = self._taken or {each.flow.form for each in flows}
        return flows

    def count_flows(self) -> int:
        """How many flows of ours the switch has."""
        self.look_alive()
        return self._guarded(self._count_flows)

    def await_turn(self) -> None:
        """Return when the switch has come to this: then it has heard what the kernel told it before."""
        with self.turning():
            pass

    @contextmanager
    def turning(self) -> Iterator[None]:
        """The same, mostly while the block runs: what the switch has heard by its end is what was told before it.

        In one turn it answers and forwards twice, before it goes over its ports and after that, and only then takes in
        what the kernel has told. So it is asked again when it has answered.
        """
        self.look_alive()
        self._guarded(lambda stream: self._send_all(stream, ()))
        first, done = self._guarded(lambda stream: self._post(stream, ()))
        yield
        self._guarded(lambda stream: self._answer(stream, _BARRIER_REPLY, done, since=first))

    def take_told(self) -> list[PacketIn]:
        """What was told about packets since the last call, oldest first; a sample when it is much."""
        self.look_alive()
        told = [*self._told]
        self._told.clear()
        return told

    def forget_connections(self, zoned: Iterable[Zoned]) -> None:
        """No connection has one of these addresses, in its zone, at either end; Open vSwitch has this since 3.1."""
        self._tell(_EXPERIMENTER, [*_flushes(zoned)])

    def forget_zones(self, zones: Iterable[int]) -> None:
        """No connection in these zones."""
        form = _FLUSH_FORM.pack(_NICIRA, _FLUSH, 0)
        self._tell(_EXPERIMENTER, [form + _ZONE_FORM.pack(_ZONE, _ZONE_FORM.size, each) for each in zones])

    def read_meters(self) -> list[Meter]:
        """Every meter of the bridge."""
        self.look_alive()
        return self._guarded(
            lambda stream: [
                meter for part in self._ask(stream, _METERS, meters_request()) for meter in decode_meters(part)
            ]
        )

    def put_meters(self, meters: Collection[Meter]) -> None:
        """The bridge has these, in place of any with the same numbers, whose flows stay."""
        if meters:
            found = {meter.number: meter for meter in self.read_meters()}
            known = [alter_meter(meter) for meter in meters if found.get(meter.number, meter) != meter]
            self._tell(_METER_MOD, [*known, *(add_meter(meter) for meter in meters if meter.number not in found)])

    def drop_meters(self, numbers: Iterable[int]) -> None:
        """None of these, of which no flow is left."""
        self._tell(_METER_MOD, [*map(delete_meter, numbers)])

    def send(self, frames: Iterable[bytes], *, port: int) -> None:
        """Have frames switched as usual, as if they had come by a port."""
        actions = encode_actions([Output(NORMAL)])
        head = _PACKET_OUT_FORM.pack(_NO_BUFFER, port, len(actions)) + actions
        self._tell(_PACKET_OUT, [head + frame for frame in frames])

    def _tell(self, kind: int, bodies: Sequence[bytes]) -> None:
        """The switch has done what messages of a kind say."""
        if bodies:
            self.look_alive()
            self._guarded(lambda stream: self._send_all(stream, [(kind, body) for body in bodies]))

    def _catch_up(self, stream: Stream) -> None:
        while data := stream.receive_waiting():  # to the end of the connection, if that is behind what waits
            for _ in self._take(stream, data):
                pass  # nobody waits for it any more

    def _begin(self) -> None:
        self._waiting = b""
        self._guarded(self._greet)

    def _greet(self, stream: Stream) -> None:
        """All of it is said at once, and packets are told to us, but not more than we can hear: telling one costs much.

        A switch that has just been started takes its time for each answer. What stands by is collected meanwhile, and
        committed when it is known whom we speak to.
        """
        standby, self._standby = self._standby if self._refills else (), ()
        stream.send(_pack(_HELLO, self._next(), _HELLO_BODY))
        greeting = (
            (_METER_MOD, delete_meter(_TELLING_METER.number)),
            (_METER_MOD, add_meter(_TELLING_METER)),
            (_SET_CONFIG, _CONFIG_FORM.pack(0, TOLD_BYTES)),
            (_MULTIPART, _MULTIPART_FORM.pack(_DESCRIPTION, 0)),
            (_MULTIPART, _MULTIPART_FORM.pack(_TOTALS, 0) + flows_request()),
        )
        numbers = [self._next() for _ in greeting]
        wire = [_pack(kind, number, body) for number, (kind, body) in zip(numbers, greeting, strict=True)]
        bundle = self._next()
        wire += self._bundle(bundle, standby) if standby else ()
        wire.append(_pack(_BARRIER, done := self._next(), b""))
        stream.send(b"".join(wire))
        if next(self._messages(stream)).kind != _HELLO:
            raise DatapathFault(f"{self.address}: does not speak OpenFlow 1.4")
        described = self._answer(stream, _MULTIPART_REPLY, numbers[-2], since=numbers[0])
        self.began_empty = not _totals(self._answer(stream, _MULTIPART_REPLY, numbers[-1])[_MULTIPART_FORM.size :])
        self._answer(stream, _BARRIER_REPLY, done, since=bundle)
        is_same, self._described = described == self._described, described
        if not is_same:  # another version may not take what this one took
            self._taken.clear()
        self.is_refilled = bool(standby) and is_same and self.began_empty
        if standby:
            end = _COMMIT if self.is_refilled else _DISCARD
            self._send_all(stream, [(_BUNDLE, _BUNDLE_FORM.pack(bundle, end, _ATOMIC_ORDERED))])

    def _bundle(self, bundle: int, bodies: Iterable[bytes]) -> Iterator[bytes]:
        """The messages that collect changes of flows under a number."""
        yield _pack(_BUNDLE, bundle, _BUNDLE_FORM.pack(bundle, _OPEN, _ATOMIC_ORDERED))
        for body in bodies:
            number = self._next()
            inner = _pack(_FLOW_MOD, number, body)
            yield _pack(_BUNDLE_ADD, number, _BUNDLE_FORM.pack(bundle, 0, _ATOMIC_ORDERED) + inner)

    def _commit(self, stream: Stream, told: Sequence[Flow | FlowKey], flushes: Sequence[bytes]) -> None:
        """What the switch refuses it leaves out of the bundle, and would commit the rest without it.

        So everything is collected first, and nothing committed when something was refused; but for forms of flows that
        it has taken before it is not asked, which saves a turn of the switch. It does things in the order in which they
        are said, so connections are forgotten when the flows are others.
        """
        forms = {each.form for each in told if isinstance(each, Flow)}
        is_known = forms <= self._taken
        self._taken -= forms  # they are not when it refuses one after all
        bundle = self._next()
        bodies = (add_flow(each) if isinstance(each, Flow) else delete_flow(each) for each in told)
        wire = [*self._bundle(bundle, bodies)]
        if not is_known:
            wire.append(_pack(_BARRIER, collected := self._next(), b""))
            stream.send(b"".join(wire))
            wire.clear()
            self._answer(stream, _BARRIER_REPLY, collected, since=bundle, told=told)
        wire.append(_pack(_BUNDLE, committed := self._next(), _BUNDLE_FORM.pack(bundle, _COMMIT, _ATOMIC_ORDERED)))
        wire += [_pack(_EXPERIMENTER, self._next(), each) for each in flushes]
        wire.append(_pack(_BARRIER, done := self._next(), b""))
        stream.send(b"".join(wire))
        self._answer(stream, _BUNDLE, committed, since=bundle, told=told)
        self._answer(stream, _BARRIER_REPLY, done, since=committed)
        self._taken |= forms

    def _send_all(self, stream: Stream, messages: Iterable[tuple[int, bytes]]) -> None:
        """Messages of these kinds; the switch has done what they say."""
        first, done = self._post(stream, messages)
        self._answer(stream, _BARRIER_REPLY, done, since=first)

    def _post(self, stream: Stream, messages: Iterable[tuple[int, bytes]]) -> tuple[int, int]:
        """Send messages of these kinds; the number of the first one, and of the barrier behind the last one."""
        first = self._number + 1
        wire = [_pack(kind, self._next(), body) for kind, body in messages]
        wire.append(_pack(_BARRIER, done := self._next(), b""))
        stream.send(b"".join(wire))
        return first, done

    def _count_flows(self, stream: Stream) -> int:
        (body,) = self._ask(stream, _TOTALS, flows_request())
        return _totals(body)

    def _ask(self, stream: Stream, kind: int, question: bytes) -> Iterator[bytes]:
        """The parts of the answer to a question of a kind."""
        number = self._next()
        stream.send(_pack(_MULTIPART, number, _MULTIPART_FORM.pack(kind, 0) + question))
        while True:
            body = self._answer(stream, _MULTIPART_REPLY, number)
            _, flags = unpack(_MULTIPART_FORM, body)
            yield body[_MULTIPART_FORM.size :]
            if not flags & _MORE:
                return

    def _answer(
        self, stream: Stream, kind: int, number: int, *, since: int | None = None, told: Sequence[Flow | FlowKey] = ()
    ) -> bytes:
        """The body of the next message of a kind that answers to a number; `DatapathFault` at an error before.

        The error may be about any message since a number, behind which those stand in which something was told.
        """
        first = number if since is None else since
        for message in self._messages(stream):
            position = message.number - first & _NUMBER_MASK
            if message.kind == _ERROR and position <= number - first & _NUMBER_MASK:
                subject = str(told[position - 1]) if 0 < position <= len(told) else "a request"
                raise _refusal(message, subject)
            if message.number == number and message.kind == kind:
                return message.body
        raise AssertionError("messages end only by a fault")

    def _messages(self, stream: Stream) -> Iterator[Message]:
        """Message after message, each within the deadline of all."""
        until = time.monotonic() + DEADLINE
        yield from self._take(stream, b"")
        while True:
            yield from self._take(stream, stream.receive(until=until))

    def _take(self, stream: Stream, data: bytes) -> Iterator[Message]:
        """The messages that these bytes complete, but those that only ask whether we are there: they are answered."""
        self._waiting += data
        while len(self._waiting) >= _HEADER.size:
            version, kind, length, number = _HEADER.unpack_from(self._waiting)
            if length < _HEADER.size or (version != _VERSION and kind not in {_HELLO, _ERROR}):
                raise DatapathFault(f"{self.address}: what it says is not OpenFlow 1.4")
            if len(self._waiting) < length:
                return
            body, self._waiting = self._waiting[_HEADER.size : length], self._waiting[length:]
            if kind == _ECHO:
                stream.send(_pack(_ECHO_REPLY, number, body))
            elif kind == _PACKET_IN:
                self._told.append(PacketIn(body, time.time()))
            else:
                yield Message(kind, number, body)

    def _next(self) -> int:
        self._number = self._number + 1 & _NUMBER_MASK
        return self._number


def _pack(kind: int, number: int, body: bytes) -> bytes:
    return _HEADER.pack(_VERSION, kind, _HEADER.size + len(body), number) + body


def _totals(body: bytes) -> int:
    """How many flows there are, out of the body of an answer."""
    return unpack(_TOTALS_FORM, body)[2]


def _flushes(zoned: Iterable[Zoned]) -> Iterator[bytes]:
    return (_flush(zone, end, address) for zone, address in zoned for end in (_SOURCE, _TARGET))


def _flush(zone: int, end: int, address: Address) -> bytes:
    """A request to forget connections by one end of their first direction."""
    number = address.number | (_MAPPED if address.family == 4 else 0)
    ends = _TUPLE_FORM.pack(_FIRST_DIRECTION, _TUPLE_FORM.size, end, 20, number.to_bytes(16, "big"))
    return _FLUSH_FORM.pack(_NICIRA, _FLUSH, 0) + ends + _ZONE_FORM.pack(_ZONE, _ZONE_FORM.size, zone)


def _refusal(message: Message, subject: str) -> DatapathFault:
    kind, code = unpack(_ERROR_FORM, message.body)
    return DatapathFault(f"openflow: {subject}: refused with error {kind}, code {code}")
