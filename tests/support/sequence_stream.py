"""A steady stream of numbered packets, each the first of a new connection, and a count of those that arrive."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from weft.lab.traffic import UDP, NetnsAddress
from weft.lab.waiting import DEADLINE, until

_PACE_S = 0.001
# After a stall the sender catches up, limited to what fits into socket buffers.
_MOST_AT_ONCE = 50
_SO_RCVBUFFORCE = 33
# Holds the packets that arrive while this process is not scheduled.
_RECEIVE_BUFFER = 1 << 23
_UDP_HEADER = struct.Struct(">HHHH")  # source port, target port, length, no checksum
_NUMBER = struct.Struct(">I")
_SOURCE_PORTS = range(20_000, 60_000)


class Stream:
    """Sends `rate` IPv4 packets per second from one address to another while the block runs."""

    def __init__(self, source: NetnsAddress, target: NetnsAddress, *, port: int, rate: int) -> None:
        self.sent = 0
        self._received: set[int] = set()
        self._port = port
        self._rate = rate
        self._target = str(target.address)
        self._closing = ExitStack()
        self._listener = self._closing.enter_context(target.listening(port, UDP))
        self._listener.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)
        self._sender = self._closing.enter_context(
            source.namespace.open_socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP)
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._closing.close()

    def stop(self) -> None:
        """Stop sending."""
        self._over.set()
        self._thread.join(DEADLINE)

    async def missing(self) -> list[int]:
        """Stop the stream, wait for packets in flight, and return the numbers of lost packets."""
        with suppress(TimeoutError):
            await until(lambda: self._listen() == self.sent)
        return sorted(set(range(self.sent)) - self._received)

    def count_missing(self) -> int:
        """The number of packets that have not arrived so far. Call `stop` first."""
        return self.sent - self._listen()

    @property
    def arrived(self) -> int:
        """The number of packets that have arrived."""
        return len(self._received)

    def _listen(self) -> int:
        with suppress(BlockingIOError):
            while True:
                self._received.add(_NUMBER.unpack(self._listener.recv(64))[0])
        return len(self._received)

    def _run(self) -> None:
        source_ports = itertools.cycle(_SOURCE_PORTS)
        length = _UDP_HEADER.size + _NUMBER.size
        began = time.monotonic()
        while not self._over.wait(_PACE_S):
            due = int((time.monotonic() - began) * self._rate)
            for number in range(self.sent, min(due, self.sent + _MOST_AT_ONCE)):
                header = _UDP_HEADER.pack(next(source_ports), self._port, length, 0)
                self._sender.sendto(header + _NUMBER.pack(number), (self._target, 0))
                self.sent = number + 1
            self._listen()
