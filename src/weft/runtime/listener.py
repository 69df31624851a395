"""Accepts connections for an HTTP server: limits before the handshake, deadlines, TLS files that change.

asyncio's own servers accept without end, and show a connection only after its TLS handshake.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager

from weft.runtime.admission import HANDSHAKE_S, Connection, Guard
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log
from weft.runtime.server_tls import ServerTls
from weft.runtime.tasks import background

log = Log("listener")

Tls = ssl.SSLContext | ServerTls | None

# Connections that the kernel completes before we accept them.
BACKLOG = 512
# Accepted in a row before other work gets its turn.
_AT_ONCE = 64
# How often the files of a TLS context are looked at without a new connection.
_TLS_CHECK_S = 2.0
# Pause after accept has failed. Connections that make room are closed by then.
_ACCEPT_RETRY_S = 0.2
# More than any of our servers takes; a process with more files is slower to fork.
_MAX_OPEN_FILES = 65_536


def raise_open_files() -> int:
    """Raise the limit of open files as far as we may (RLIMIT_NOFILE); returns it.

    The soft limit is 1,024 by default, for programs that use select().
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def bind_tcp(host: str, port: int) -> list[socket.socket]:
    """Listening sockets for a host, or for all addresses if it is empty; `OSError` if one cannot be bound."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as undo:
        listeners = []
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listener = socket.socket(family, kind, protocol)
            except OSError:
                continue  # a machine without IPv6
            undo.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind(address)
            except OSError as error:
                # `localhost` is ::1 too in /etc/hosts where sysctl disables IPv6: one address of the host is enough.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                listener.close()
                continue
            listener.listen(BACKLOG)
            listeners.append(listener)
        if not listeners:
            raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        undo.pop_all()
        return listeners


class _Counted(asyncio.Protocol):
    """A protocol that tells the guard when its connection begins and ends."""

    def __init__(self, inner: asyncio.Protocol, guard: Guard, connection: Connection) -> None:
        self._inner = inner
        self._guard = guard
        self._connection = connection
        self._transport: asyncio.BaseTransport | None = None
        # Called for each piece of a request: no detour.
        self.data_received = inner.data_received  # type: ignore[method-assign]
        self.pause_writing = inner.pause_writing  # type: ignore[method-assign]
        self.resume_writing = inner.resume_writing  # type: ignore[method-assign]
        self.eof_received = inner.eof_received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._guard.attach(self._connection, transport)
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.release(self._connection, self._transport)
        self._inner.connection_lost(exc)


@asynccontextmanager
async def accepting(
    listeners: Sequence[socket.socket], protocol: Callable[[], asyncio.Protocol], *, tls: Tls, guard: Guard
) -> AsyncIterator[None]:
    """Accept connections while the block runs. The listeners are closed at its end, connections are not."""
    acceptor = _Acceptor(protocol, tls=tls, guard=guard)
    async with background(acceptor.run(listeners), name=f"listener {guard.listener}"):
        try:
            yield
        finally:
            for listener in listeners:
                acceptor.stop(listener)


class _Acceptor:
    def __init__(self, protocol: Callable[[], asyncio.Protocol], *, tls: Tls, guard: Guard) -> None:
        self._protocol = protocol
        self._tls = tls
        self._guard = guard
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[bool]] = set()

    async def run(self, listeners: Sequence[socket.socket]) -> None:
        for listener in listeners:
            listener.setblocking(False)
            self._resume(listener)
        try:
            # Established connections must not outlive the CA that they were authenticated by.
            pace = Backoff(first=_TLS_CHECK_S, cap=_TLS_CHECK_S)
            while True:
                await pace.pause()
                if isinstance(self._tls, ServerTls):
                    self._tls.current()
                    if self._tls.has_new_ca():
                        log.info("client CA changed: closing connections", listener=self._guard.listener)
                        self._guard.close_all()
        finally:
            for task in self._tasks:
                task.cancel()

    def stop(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.remove_reader(listener)
            listener.close()

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of file descriptors or of memory
                self._guard.make_room(str(error))
                # The listener stays readable while accept fails: polling it would keep the loop busy.
                self._loop.remove_reader(listener)
                self._loop.call_later(_ACCEPT_RETRY_S, self._resume, listener)
                return
            client.setblocking(False)
            evicted = self._guard.evicted
            self._admit(client, address[0] if isinstance(address, tuple) else "")
            if self._guard.evicted > evicted:
                return  # its descriptor is closed by the loop's next turn: not before the next accept otherwise

    def _admit(self, client: socket.socket, host: str) -> None:
        connection = self._guard.admit(host, client.close)
        if connection is None:
            client.close()
            return
        task = self._loop.create_task(self._establish(client, connection))

        def cancel() -> None:
            task.cancel()

        connection.close = cancel  # until the handshake is over
        self._tasks.add(task)

        def done(_: asyncio.Task[bool]) -> None:
            self._tasks.discard(task)
            # A task that is cancelled before it begins has not run at all, so this is no part of it.
            error = None if task.cancelled() else task.exception()
            if error is not None:
                log.error("connection failed", listener=self._guard.listener, reason=repr(error))
            if task.cancelled() or error is not None or not task.result():
                self._guard.release(connection)
                client.close()

        task.add_done_callback(done)

    async def _establish(self, client: socket.socket, connection: Connection) -> bool:
        """Hand the connection over to its protocol; whether that succeeded."""
        tls = self._tls.current() if isinstance(self._tls, ServerTls) else self._tls
        # Passing None for both timeouts without TLS: asyncio rejects them there.
        limit = HANDSHAKE_S if tls else None
        try:
            await self._loop.connect_accepted_socket(
                lambda: _Counted(self._protocol(), self._guard, connection),
                client,
                ssl=tls,
                ssl_handshake_timeout=limit,
                ssl_shutdown_timeout=limit,
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are OSErrors
            log.debug("handshake failed", listener=self._guard.listener, reason=str(error))
            return False
        return True
