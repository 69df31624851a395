"""A packet flood from its own thread, and taps that capture every packet that arrives in a namespace."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

from weft.kernel.netns import Namespace
from weft.kernel.packet_headers import Packet, parse_packet
from weft.lab.waiting import DEADLINE

_ALL_PROTOCOLS = 0x0003
_IP_PROTOCOLS = frozenset({0x0800, 0x86DD})
_OUTGOING = 4
_HEADERS_BYTES = 128
_TAP_BYTES = 1 << 22
# Pause after each round, so that a flood does not starve the machine.
_PAUSE_S = 0.0003


class FloodDatagram(NamedTuple):
    """A datagram that is sent in every round."""

    sender: socket.socket
    address: str
    port: int


class Flood:
    """Sends all its datagrams in rounds while the block runs. Errors such as "no route" are ignored."""

    def __init__(self) -> None:
        # May be replaced at any time.
        self.datagrams: tuple[FloodDatagram, ...] = ()
        # The number of complete rounds.
        self.rounds = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flood", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(DEADLINE)

    def _run(self) -> None:
        while not self._over.wait(_PAUSE_S):
            for sender, address, port in self.datagrams:
                with suppress(OSError):
                    sender.sendto(b"flood", (address, port))
            self.rounds += 1


class Tap:
    """Captures packets of every device in a namespace, also of devices created later."""

    def __init__(self, namespace: Namespace) -> None:
        self._socket = namespace.open_socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ALL_PROTOCOLS))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TAP_BYTES)
        self._socket.setblocking(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def packets(self) -> list[Packet]:
        """The IP packets since the last call."""
        found = []
        with suppress(BlockingIOError):
            while True:
                data, (_, protocol, kind, *_) = self._socket.recvfrom(_HEADERS_BYTES)
                if protocol in _IP_PROTOCOLS and kind != _OUTGOING:
                    found.append(parse_packet(data))
        return found
