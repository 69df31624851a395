"""A flood of packets from a thread of its own, and taps that see every packet which comes to a namespace."""

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
# A flood leaves the machine to others for a moment after each wave.
_BREATH_S = 0.0003


class Shot(NamedTuple):
    """A datagram that is sent again and again."""

    mouth: socket.socket
    address: str
    port: int


class Flood:
    """Sends all its shots in waves while the block runs. What has no way yet is tried again."""

    def __init__(self) -> None:
        # May be exchanged at any time.
        self.shots: tuple[Shot, ...] = ()
        # How often all of them were sent.
        self.waves = 0
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
        while not self._over.wait(_BREATH_S):
            for mouth, address, port in self.shots:
                with suppress(OSError):
                    mouth.sendto(b"flood", (address, port))
            self.waves += 1


class Tap:
    """Sees what comes to a namespace by any device, also by one that is yet to be made."""

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

    def seen(self) -> list[Packet]:
        """The IP packets that have come since the last call."""
        found = []
        with suppress(BlockingIOError):
            while True:
                data, (_, protocol, kind, *_) = self._socket.recvfrom(_HEADERS_BYTES)
                if protocol in _IP_PROTOCOLS and kind != _OUTGOING:
                    found.append(parse_packet(data))
        return found
