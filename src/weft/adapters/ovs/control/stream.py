"""A byte stream to an OVS daemon; every wait has a deadline. It belongs to one thread at a time.

Addresses are `unix:PATH` or `tcp:HOST:PORT`, as in OVS tools.
"""

from __future__ import annotations

import select
import socket
import time

from weft.domain.errors import DatapathFault, Invalid

# Seconds for a reply. A healthy daemon takes milliseconds, with very many ports up to a second.
DEADLINE = 10.0
# Flow dumps come in messages of up to 64 KiB; read several with one system call.
_CHUNK = 1 << 18


class Stream:
    """An open connection. Every error is a `DatapathFault`; the connection cannot be used after one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._socket = _connect(address)

    def send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._fault(error) from error

    def receive(self, *, until: float) -> bytes:
        """The next bytes, which must arrive before a `time.monotonic` deadline."""
        left = until - time.monotonic()
        if left <= 0 or not self._is_readable(within=left):
            raise DatapathFault(f"{self.address}: no reply within {DEADLINE:g} s")
        return self._read()

    def receive_available(self) -> bytes:
        """The bytes that have arrived, perhaps none."""
        return self._read() if self._is_readable(within=0) else b""

    def close(self) -> None:
        self._socket.close()

    def _is_readable(self, *, within: float) -> bool:
        """Whether data or end-of-file arrives within so many seconds."""
        # Not select(): it fails for descriptors above 1023.
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(within * 1000))

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(_CHUNK)
        except OSError as error:
            raise self._fault(error) from error
        # A daemon that exits closes the connection in order, without an error.
        if not data:
            raise DatapathFault(f"{self.address}: connection closed by peer")
        return data

    def _fault(self, error: OSError) -> DatapathFault:
        return DatapathFault(f"{self.address}: {error.strerror or error}")


def _connect(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    opened = socket.socket(socket.AF_UNIX) if kind == "unix" else None
    try:
        if opened is not None:
            # A stopped daemon with a full backlog would block connect and send without end.
            opened.settimeout(DEADLINE)
            opened.connect(rest)
        elif kind == "tcp" and port.isdecimal():
            # IPv6 addresses are in brackets.
            opened = socket.create_connection((host.strip("[]"), int(port)), timeout=DEADLINE)
        else:
            raise Invalid(f"{address!r} is neither unix:PATH nor tcp:HOST:PORT")
    except OSError as error:
        if opened is not None:
            opened.close()
        raise DatapathFault(f"{address}: {error.strerror or error}") from error
    return opened
