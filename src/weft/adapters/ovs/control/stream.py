"""A byte stream to a daemon of the switch, whose every wait has a deadline. It belongs to one thread at a time.

An address is `unix:PATH` or `tcp:HOST:PORT`, as the switch's own tools write it.
"""

from __future__ import annotations

import select
import socket
import time

from weft.domain.errors import DatapathFault, Invalid

# Seconds for an answer. A healthy daemon takes milliseconds, with very many ports perhaps a second.
DEADLINE = 10.0
_CHUNK = 1 << 18


class Stream:
    """An open connection. Everything that goes wrong with it is a `DatapathFault`, and ends it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = _connect(address)

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._fault(error) from error

    def receive(self, *, until: float) -> bytes:
        """The next bytes, which must come before a moment of `time.monotonic`."""
        left = until - time.monotonic()
        if left <= 0 or not self._has_news(within=left):
            raise DatapathFault(f"{self.address}: no answer within {DEADLINE:g} s")
        return self._read()

    def receive_waiting(self) -> bytes:
        """The bytes that are there already, perhaps none."""
        return self._read() if self._has_news(within=0) else b""

    def close(self) -> None:
        self._socket.close()

    def _has_news(self, *, within: float) -> bool:
        """Whether there is something to read, or an end, before so many seconds have passed.

        `select.select` would fail in a process that has a thousand files open.
        """
        news = select.poll()
        news.register(self._socket, select.POLLIN)
        return bool(news.poll(within * 1000))

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_CHUNK)
        except OSError as error:
            raise self._fault(error) from error
        if not data:
            raise DatapathFault(f"{self.address}: the connection has ended")
        return data

    def _fault(self, error: OSError) -> DatapathFault:
        return DatapathFault(f"{self.address}: {error.strerror or error}")


def _connect(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    opened = socket.socket(socket.AF_UNIX) if kind == "unix" else None
    try:
        if opened is not None:
            opened.settimeout(DEADLINE)
            opened.connect(rest)
        elif kind == "tcp" and port.isdecimal():
            opened = socket.create_connection((host.strip("[]"), int(port)), timeout=DEADLINE)
        else:
            raise Invalid(f"{address!r} is neither unix:PATH nor tcp:HOST:PORT")
    except OSError as error:
        if opened is not None:
            opened.close()
        raise DatapathFault(f"{address}: {error.strerror or error}") from error
    return opened
