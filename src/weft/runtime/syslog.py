"""Log records to a syslog server, from a thread of its own: a server that stops reading must not stop the program."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections import deque
from contextlib import suppress

# Bytes of records that wait for the server; the oldest are dropped beyond that.
MAX_WAITING = 1 << 20
# Seconds for a connection attempt, and for the server to take a record.
_TIMEOUT_S = 5.0
# Pauses between connection attempts, in seconds.
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 30.0
# Seconds for what is left when the program ends.
_FLUSH_S = 1.0
# RFC 5424: the facility `user`, and severities by level.
_FACILITY = 1 << 3
_SEVERITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7


class SyslogHandler(logging.Handler):
    """Sends records by UDP, or by TCP as lines (RFC 6587). It connects again after an error, with a backoff."""

    def __init__(self, protocol: str, host: str, port: int) -> None:
        super().__init__()
        self._kind = socket.SOCK_DGRAM if protocol == "udp" else socket.SOCK_STREAM
        self._address = (host, port)
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        # Records that were lost, in all and since the server was last told.
        self.dropped = self._untold = 0
        # Guards the queue, which many threads fill.
        self._changed = threading.Condition()
        self._is_ending = False
        self._socket: socket.socket | None = None
        self._pause = _FIRST_PAUSE_S
        # A daemon: a server that does not answer must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name="syslog", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record; never waits for the server."""
        try:
            line = self._encode(record.levelno, self.format(record))
        except Exception:  # as every handler does: a record that cannot be formatted must not end the program
            self.handleError(record)
            return
        with self._changed:
            self._waiting.append(line)
            self._bytes += len(line)
            # The newest tell most about what is wrong now.
            while self._bytes > MAX_WAITING:
                self._bytes -= len(self._waiting.popleft())
                self._drop()
            self._changed.notify()

    def close(self) -> None:
        """Send what is left, for a moment, and end the thread."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(_FLUSH_S)
        super().close()

    def _encode(self, level: int, text: str) -> bytes:
        severity = next((number for least, number in _SEVERITIES if level >= least), _DEBUG)
        # One record is one line: the end of a line is the end of a record.
        body = text.replace("\n", "\\n").encode(errors="replace")
        end = b"\n" if self._kind == socket.SOCK_STREAM else b""
        return b"<%d>" % (_FACILITY | severity) + body + end

    def _drop(self) -> None:
        self.dropped += 1
        self._untold += 1

    def _run(self) -> None:
        while (line := self._next()) is not None:
            try:
                self._connected().sendall(line)
                self._tell_dropped()
                self._pause = _FIRST_PAUSE_S
            except OSError:
                self._disconnect()
                with self._changed:
                    # TCP does not say how much of it arrived, and a record may be sent twice rather than not at all.
                    if self._bytes + len(line) <= MAX_WAITING:
                        self._waiting.appendleft(line)
                        self._bytes += len(line)
                    else:
                        self._drop()
                    if self._is_ending:
                        return
                    self._changed.wait_for(lambda: self._is_ending, timeout=self._pause * random.uniform(0.5, 1))  # noqa: S311
                self._pause = min(2 * self._pause, _MAX_PAUSE_S)
        self._disconnect()

    def _next(self) -> bytes | None:
        """The next record; None when the program ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_ending)
            if not self._waiting:
                return None
            line = self._waiting.popleft()
            self._bytes -= len(line)
            return line

    def _connected(self) -> socket.socket:
        if self._socket is None:
            family, kind, protocol, _, address = socket.getaddrinfo(*self._address, type=self._kind)[0]
            opened = socket.socket(family, kind, protocol)
            opened.settimeout(_TIMEOUT_S)
            self._socket = opened
            opened.connect(address)
        elif self._kind == socket.SOCK_STREAM:
            self._check_open(self._socket)
        return self._socket

    @staticmethod
    def _check_open(connection: socket.socket) -> None:
        """`OSError` if the server has closed the connection: the next record would vanish without an error."""
        with suppress(BlockingIOError):
            if connection.recv(1024, socket.MSG_DONTWAIT) == b"":
                raise ConnectionResetError("the syslog server closed the connection")

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell_dropped(self) -> None:
        with self._changed:
            untold, self._untold = self._untold, 0
        if untold:
            assert self._socket is not None
            self._socket.sendall(self._encode(logging.WARNING, f"log records dropped count={untold}"))
