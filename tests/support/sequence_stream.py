"""A steady stream of numbered packets, each of them the first of a new connection, and a count of those that arrive."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self

from weft.lab.traffic import UDP, Place
from weft.lab.waiting import DEADLINE, until

_PACE_S = 0.001
# After a pause a sender catches up, by not more than a kernel takes at once.
_MOST_AT_ONCE = 50
_SO_RCVBUFFORCE = 33
# What comes while this process has to wait for its turn.
_EAR_BYTES = 1 << 23
_UDP_HEADER = struct.Struct(">HHHH")  # source port, target port, length, no checksum
_NUMBER = struct.Struct(">I")
_CALLERS = range(20_000, 60_000)


class Stream:
    """Sends `rate` packets a second from one place to another, IPv4 both, while the block runs."""

    def __init__(self, source: Place, target: Place, *, port: int, rate: int) -> None:
        self.sent = 0
        self._heard: set[int] = set()
        self._port = port
        self._rate = rate
        self._target = str(target.address)
        self._closing = ExitStack()
        self._ear = self._closing.enter_context(target.listening(port, UDP))
        self._ear.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _EAR_BYTES)
        self._mouth = self._closing.enter_context(
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
        """Send no more."""
        self._over.set()
        self._thread.join(DEADLINE)

    async def missing(self) -> list[int]:
        """The numbers of the packets that do not arrive, when time enough has passed for all others. Stopped first."""
        with suppress(TimeoutError):
            await until(lambda: self._listen() == self.sent)
        return sorted(set(range(self.sent)) - self._heard)

    def count_missing(self) -> int:
        """How many have not arrived so far. Stopped first."""
        return self.sent - self._listen()

    @property
    def arrived(self) -> int:
        """How many have arrived."""
        return len(self._heard)

    def _listen(self) -> int:
        with suppress(BlockingIOError):
            while True:
                self._heard.add(_NUMBER.unpack(self._ear.recv(64))[0])
        return len(self._heard)

    def _run(self) -> None:
        callers = itertools.cycle(_CALLERS)
        length = _UDP_HEADER.size + _NUMBER.size
        began = time.monotonic()
        while not self._over.wait(_PACE_S):
            due = int((time.monotonic() - began) * self._rate)
            for number in range(self.sent, min(due, self.sent + _MOST_AT_ONCE)):
                header = _UDP_HEADER.pack(next(callers), self._port, length, 0)
                self._mouth.sendto(header + _NUMBER.pack(number), (self._target, 0))
                self.sent = number + 1
            self._listen()
