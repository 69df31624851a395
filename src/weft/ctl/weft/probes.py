"""One packet out of a workload, made so that it disturbs nobody, and what comes back or passes by.

TCP is asked by a bare SYN: whoever listens answers, and the kernel of the workload, which knows of no such connection,
ends it before it is one. UDP is an empty datagram, ICMP an echo request. All of it needs the right to open raw sockets.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from types import TracebackType
from typing import Final, NamedTuple, Self

from weft.ctl.failures import CommandError, Usage
from weft.ctl.weft.mtu_probe import checksum
from weft.domain.policy.model.protocols import ICMP, ICMPV6, TCP, UDP, protocol_name

_FAMILIES: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
_ECHO_REQUEST: Final = {4: 8, 6: 128}
_ECHO_REPLY: Final = {4: 0, 6: 129}
_ALL_PROTOCOLS = 0x0003
_OUTGOING = 4
_TAP_BYTES = 1 << 22
_RECEIVE = 2048
_HEADERS_BYTES = 128
_IPV6_CHECKSUM = 7
_TCP_HEADER = struct.Struct("!HHIIBBHHH")
_TCP_CHECKSUM_AT = 16
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_NOBODY_THERE = "ICMP: nobody listens on that port"


class Way(NamedTuple):
    """From where to where a probe goes. The port is 0 for ICMP."""

    source: str
    target: str
    protocol: int
    port: int

    @property
    def version(self) -> int:
        return ip_address(self.source).version


class Probe:
    """A packet that can be sent again and again; `answer` says what came back."""

    def __init__(self, way: Way, mouth: socket.socket, *, own_port: int, data: bytes, mark: bytes) -> None:
        """`mark` is how the packet's payload begins on the wire, or for ICMP what follows its checksum."""
        self.way = way
        self.own_port = own_port
        self.mouth = mouth
        self._data = data
        self._mark = mark
        self._late = ""

    def send(self) -> None:
        """`CommandError` when it cannot even leave the workload."""
        try:
            self.mouth.send(self._data)
        except ConnectionRefusedError:
            self._late = _NOBODY_THERE  # this is the answer to an earlier one
        except OSError as error:
            raise CommandError(f"the packet cannot leave {self.way.source}: {error.strerror}") from error

    def answer(self) -> str:
        """What has come back, in words; empty while there is nothing. Never waits."""
        try:
            while not self._late:
                if said := self._understand(self.mouth.recv(_RECEIVE)):
                    return said
        except BlockingIOError:
            return ""
        except ConnectionRefusedError:
            return _NOBODY_THERE
        except OSError as error:
            raise CommandError(f"{self.way.target} is not reached: {error.strerror}") from error
        return self._late

    def is_on(self, packet: bytes) -> bool:
        """Whether this is the probe, as seen on a device from its IP header on."""
        if self.way.version == 4:
            start, protocol, ends = (packet[0] & 0x0F) * 4, packet[9:10], packet[12:20]
        else:
            start, protocol, ends = 40, packet[6:7], packet[8:40]
        wanted = ip_address(self.way.source).packed + ip_address(self.way.target).packed
        skipped = 4 if self.way.protocol in (ICMP, ICMPV6) else 0
        said = packet[start + skipped : start + skipped + len(self._mark)]
        return protocol == bytes([self.way.protocol]) and ends == wanted and said == self._mark

    def _understand(self, data: bytes) -> str:
        if self.way.protocol == UDP:
            return "a datagram"
        message = data[(data[0] & 0x0F) * 4 :] if self.way.version == 4 else data
        if self.way.protocol != TCP:
            is_reply = message[:1] == bytes([_ECHO_REPLY[self.way.version]]) and message[4:8] == self._mark
            return "an echo reply" if is_reply else ""
        if len(message) < _TCP_HEADER.size or message[:4] != struct.pack("!HH", self.way.port, self.own_port):
            return ""
        flags = message[13]
        if flags & _RST:
            return "RST: nobody listens on that port"
        return "SYN-ACK" if flags & _SYN and flags & _ACK else ""


@contextmanager
def open_probe(way: Way, enter: Callable[[], None]) -> Iterator[Probe]:
    """A probe whose sockets are opened where `enter` moves a thread to; `Usage` for a protocol it does not know."""
    if way.protocol not in (TCP, UDP, ICMP, ICMPV6):
        raise Usage(f"{protocol_name(way.protocol)} cannot be probed: use tcp/PORT, udp/PORT or icmp")
    family = _FAMILIES[way.version]
    kind, protocol = (socket.SOCK_DGRAM, 0) if way.protocol == UDP else (socket.SOCK_RAW, way.protocol)
    with ExitStack() as closing:
        mouth = closing.enter_context(open_elsewhere(enter, lambda: socket.socket(family, kind, protocol)))
        mouth.setblocking(False)
        mouth.bind((way.source, 0))
        try:
            mouth.connect((way.target, way.port if way.protocol == UDP else 0))
        except OSError as error:
            raise CommandError(f"there is no way from {way.source} to {way.target}: {error.strerror}") from error
        if way.protocol in (ICMP, ICMPV6):
            mark = os.urandom(4)
            yield Probe(way, mouth, own_port=0, data=_echo(way.version, mark), mark=mark)
            return
        holder = mouth
        if way.protocol == TCP:  # nobody else gets the port meanwhile
            holder = closing.enter_context(open_elsewhere(enter, lambda: socket.socket(family, socket.SOCK_STREAM)))
            holder.bind((way.source, 0))
            if way.version == 6:
                mouth.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, _TCP_CHECKSUM_AT)
        own_port = holder.getsockname()[1]
        data = _syn(way, own_port) if way.protocol == TCP else b""
        yield Probe(way, mouth, own_port=own_port, data=data, mark=struct.pack("!HH", own_port, way.port))


class Tap:
    """Sees what leaves by any device of a space."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self.ear = open_elsewhere(
            enter, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PROTOCOLS))
        )
        self.ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TAP_BYTES)
        self.ear.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ear.close()

    def left_by(self, probe: Probe) -> str:
        """The device by which the probe has left since the last call; empty when it was not seen. Never waits."""
        with suppress(BlockingIOError):
            while True:
                packet, (device, _, kind, *_) = self.ear.recvfrom(_HEADERS_BYTES)
                if kind == _OUTGOING and len(packet) >= 20 and probe.is_on(packet):
                    return str(device)
        return ""


def open_elsewhere(enter: Callable[[], None], make: Callable[[], socket.socket]) -> socket.socket:
    """A socket made on a thread that moves elsewhere and ends there; it is used from here."""
    made: list[socket.socket] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            enter()
            made.append(make())
        except Exception as error:  # carried to the caller, whatever it is
            faults.append(error)

    thread = threading.Thread(target=run, name="elsewhere")
    thread.start()
    thread.join()
    if faults:
        fault = faults[0]
        if isinstance(fault, OSError):
            raise CommandError(f"no socket for a probe: {fault.strerror}; are you root?") from fault
        raise fault
    return made[0]


def _syn(way: Way, own_port: int) -> bytes:
    number = int.from_bytes(os.urandom(4), "big")
    bare = _TCP_HEADER.pack(own_port, way.port, number, 0, (_TCP_HEADER.size // 4) << 4, _SYN, 1024, 0, 0)
    if way.version == 6:
        return bare  # the kernel puts the checksum in
    ends = ip_address(way.source).packed + ip_address(way.target).packed
    total = checksum(ends + struct.pack("!BBH", 0, TCP, len(bare)) + bare)
    return bare[:_TCP_CHECKSUM_AT] + struct.pack("!H", total) + bare[_TCP_CHECKSUM_AT + 2 :]


def _echo(version: int, mark: bytes) -> bytes:
    bare = struct.pack("!BBH", _ECHO_REQUEST[version], 0, 0) + mark
    if version == 6:
        return bare
    return bare[:2] + struct.pack("!H", checksum(bare)) + bare[4:]
