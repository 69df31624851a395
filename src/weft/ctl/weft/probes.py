"""Probe packets of `weft trace --packet`, sent from a workload's network namespace, and their replies.

The TCP probe is a bare SYN from a raw socket: a listener replies, and the kernel of the workload, which has no such
connection, answers with RST, so no connection is established. The UDP probe is an empty datagram, the ICMP probe an
echo request. Needs CAP_NET_RAW.
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
_ETH_P_ALL = 0x0003
_PACKET_OUTGOING = 4
# The tap sees all packets of the namespace, so its buffer must hold a burst.
_TAP_BUFFER_BYTES = 1 << 22
_RECEIVE_BYTES = 2048
_HEADER_BYTES = 128
# linux/in6.h: the kernel computes the checksum of a raw IPv6 socket at this offset.
_IPV6_CHECKSUM = 7
_TCP_HEADER = struct.Struct("!HHIIBBHHH")
_TCP_CHECKSUM_OFFSET = 16
_SYN, _RST, _ACK = 0x02, 0x04, 0x10
_PORT_UNREACHABLE = "ICMP port unreachable: no listener on that port"


class ProbeFlow(NamedTuple):
    """The flow of a probe. The port is 0 for ICMP."""

    source: str
    target: str
    protocol: int
    port: int

    @property
    def version(self) -> int:
        return ip_address(self.source).version


class Probe:
    """A probe packet that can be sent repeatedly."""

    def __init__(
        self, flow: ProbeFlow, client: socket.socket, *, source_port: int, data: bytes, signature: bytes
    ) -> None:
        """`signature` is how the packet's payload begins on the wire, or for ICMP what follows its checksum."""
        self.flow = flow
        self.source_port = source_port
        self.socket = client
        self._data = data
        self._signature = signature
        self._pending_reply = ""

    def send(self) -> None:
        """Send the probe; `CommandError` if the workload cannot send it."""
        try:
            self.socket.send(self._data)
        except ConnectionRefusedError:
            # A connected UDP socket reports the ICMP error of an earlier probe here.
            self._pending_reply = _PORT_UNREACHABLE
        except OSError as error:
            raise CommandError(f"cannot send from {self.flow.source}: {error.strerror}") from error

    def reply(self) -> str:
        """A description of the reply; empty if there is none yet. Does not block."""
        try:
            while not self._pending_reply:
                if reply := self._parse_reply(self.socket.recv(_RECEIVE_BYTES)):
                    return reply
        except BlockingIOError:
            return ""
        except ConnectionRefusedError:
            return _PORT_UNREACHABLE
        except OSError as error:
            raise CommandError(f"cannot reach {self.flow.target}: {error.strerror}") from error
        return self._pending_reply

    def matches(self, packet: bytes) -> bool:
        """Whether a packet, from its IP header on, is this probe."""
        if self.flow.version == 4:
            start, protocol, addresses = (packet[0] & 0x0F) * 4, packet[9:10], packet[12:20]
        else:
            # Probes have no extension headers.
            start, protocol, addresses = 40, packet[6:7], packet[8:40]
        expected = ip_address(self.flow.source).packed + ip_address(self.flow.target).packed
        # The checksum of ICMP is between its type and the signature, and the kernel may compute it.
        skipped = 4 if self.flow.protocol in (ICMP, ICMPV6) else 0
        found = packet[start + skipped : start + skipped + len(self._signature)]
        return protocol == bytes([self.flow.protocol]) and addresses == expected and found == self._signature

    def _parse_reply(self, data: bytes) -> str:
        if self.flow.protocol == UDP:
            return "a datagram"
        message = data[(data[0] & 0x0F) * 4 :] if self.flow.version == 4 else data
        if self.flow.protocol != TCP:
            is_reply = message[:1] == bytes([_ECHO_REPLY[self.flow.version]]) and message[4:8] == self._signature
            return "an echo reply" if is_reply else ""
        if len(message) < _TCP_HEADER.size or message[:4] != struct.pack("!HH", self.flow.port, self.source_port):
            return ""
        flags = message[13]
        if flags & _RST:
            return "RST: no listener on that port"
        return "SYN-ACK" if flags & _SYN and flags & _ACK else ""


@contextmanager
def open_probe(flow: ProbeFlow, enter: Callable[[], None]) -> Iterator[Probe]:
    """Open a probe in the namespace that `enter` moves a thread to; `Usage` for an unsupported protocol."""
    if flow.protocol not in (TCP, UDP, ICMP, ICMPV6):
        raise Usage(f"{protocol_name(flow.protocol)} cannot be probed: use tcp/PORT, udp/PORT or icmp")
    family = _FAMILIES[flow.version]
    kind, protocol = (socket.SOCK_DGRAM, 0) if flow.protocol == UDP else (socket.SOCK_RAW, flow.protocol)
    with ExitStack() as closing:
        client = closing.enter_context(open_in_netns(enter, lambda: socket.socket(family, kind, protocol)))
        client.setblocking(False)
        client.bind((flow.source, 0))
        try:
            client.connect((flow.target, flow.port if flow.protocol == UDP else 0))
        except OSError as error:
            raise CommandError(f"no route from {flow.source} to {flow.target}: {error.strerror}") from error
        if flow.protocol in (ICMP, ICMPV6):
            signature = os.urandom(4)
            yield Probe(flow, client, source_port=0, data=_echo(flow.version, signature), signature=signature)
            return
        holder = client
        if flow.protocol == TCP:
            # Bound, so that no other socket of the workload gets the source port. Not listening, so the kernel replies
            # with RST to the SYN-ACK.
            holder = closing.enter_context(open_in_netns(enter, lambda: socket.socket(family, socket.SOCK_STREAM)))
            holder.bind((flow.source, 0))
            if flow.version == 6:
                client.setsockopt(socket.IPPROTO_IPV6, _IPV6_CHECKSUM, _TCP_CHECKSUM_OFFSET)
        source_port = holder.getsockname()[1]
        data = _syn(flow, source_port) if flow.protocol == TCP else b""
        yield Probe(
            flow, client, source_port=source_port, data=data, signature=struct.pack("!HH", source_port, flow.port)
        )


class Tap:
    """Captures the packets that leave through any device of a network namespace."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self.socket = open_in_netns(
            enter, lambda: socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL))
        )
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TAP_BUFFER_BYTES)
        self.socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def egress_device(self, probe: Probe) -> str:
        """The device through which the probe has left since the last call; empty if none. Does not block."""
        with suppress(BlockingIOError):
            while True:
                packet, (device, _, packet_type, *_) = self.socket.recvfrom(_HEADER_BYTES)
                # Outgoing only: a forwarded packet is seen on its input device too.
                if packet_type == _PACKET_OUTGOING and len(packet) >= 20 and probe.matches(packet):
                    return str(device)
        return ""


def open_in_netns(enter: Callable[[], None], make: Callable[[], socket.socket]) -> socket.socket:
    """Open a socket in another namespace, for use from this one.

    A thread of its own enters the namespace, because setns(2) cannot always be undone.
    """
    made: list[socket.socket] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            enter()
            made.append(make())
        except Exception as error:  # raised again on the calling thread
            faults.append(error)

    thread = threading.Thread(target=run, name="open-in-netns")
    thread.start()
    thread.join()
    if faults:
        fault = faults[0]
        if isinstance(fault, OSError):
            raise CommandError(f"cannot open a socket for the probe: {fault.strerror}; are you root?") from fault
        raise fault
    return made[0]


def _syn(flow: ProbeFlow, source_port: int) -> bytes:
    # A random sequence number, as RFC 6528 asks for.
    number = int.from_bytes(os.urandom(4), "big")
    bare = _TCP_HEADER.pack(source_port, flow.port, number, 0, (_TCP_HEADER.size // 4) << 4, _SYN, 1024, 0, 0)
    if flow.version == 6:
        return bare  # the kernel computes the checksum (IPV6_CHECKSUM)
    ends = ip_address(flow.source).packed + ip_address(flow.target).packed
    total = checksum(ends + struct.pack("!BBH", 0, TCP, len(bare)) + bare)
    return bare[:_TCP_CHECKSUM_OFFSET] + struct.pack("!H", total) + bare[_TCP_CHECKSUM_OFFSET + 2 :]


def _echo(version: int, signature: bytes) -> bytes:
    bare = struct.pack("!BBH", _ECHO_REQUEST[version], 0, 0) + signature
    if version == 6:
        return bare
    return bare[:2] + struct.pack("!H", checksum(bare)) + bare[4:]
