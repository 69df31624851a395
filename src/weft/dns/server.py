"""Serves one tenant's queries over UDP and TCP, on sockets in its netns."""

from __future__ import annotations

import asyncio
import socket
import struct

from weft.dns.encode import encode_answer
from weft.dns.forward import Forwarder
from weft.dns.respond import Responder, UpstreamQuery
from weft.dns.tenant_sockets import Sockets
from weft.dns.wire import MAX_MESSAGE_SIZE, Question, Rcode
from weft.domain.errors import Malformed, Unavailable
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log

log = Log("dns")

# How long a TCP connection may stay without a complete query.
IDLE_S = 10.0
# Limits per tenant, so that one tenant cannot take the sockets and memory of all.
MAX_TCP_CONNECTIONS = 128
MAX_FORWARDED = 256
# Datagrams answered before other tenants and tasks get their turn.
_BATCH = 64
_MAX_QUERY = 4096
# struct in6_pktinfo: destination address and interface index.
_PACKET_INFO = struct.Struct("=16sI")
_CONTROL_SIZE = socket.CMSG_SPACE(_PACKET_INFO.size)
_LENGTH = struct.Struct("!H")
# struct linger with a timeout of 0: close sends RST.
_LINGER_RESET = struct.pack("ii", 1, 0)

Control = list[tuple[int, int, bytes]]
Client = tuple[str, int, int, int]


class TenantServer:
    """Owns the sockets. `run` is the parent of all its tasks."""

    def __init__(self, sockets: Sockets, *, responder: Responder, forwarder: Forwarder) -> None:
        self._sockets = sockets
        self._responder = responder
        self._forwarder = forwarder
        self._forwarding = 0
        self._connections = 0

    async def run(self) -> None:
        """Serve until cancelled. No socket of ours is left in the netns then."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as tasks:
                loop.add_reader(self._sockets.udp, self._read_datagrams, tasks)
                await self._accept(tasks)
        finally:
            loop.remove_reader(self._sockets.udp)
            self._sockets.close()

    def _read_datagrams(self, tasks: asyncio.TaskGroup) -> None:
        receive = self._sockets.udp.recvmsg
        for _ in range(_BATCH):
            try:
                data, control, _, client = receive(_MAX_QUERY, _CONTROL_SIZE)
            except BlockingIOError:
                return
            answer = self._answer(data, client[0], over_tcp=False)
            if isinstance(answer, bytes):
                self._send(answer, control, client)
            elif answer is not None:
                self._forward_datagram(tasks, answer, control, client)

    def _answer(self, data: bytes, client: str, *, over_tcp: bool) -> bytes | UpstreamQuery | None:
        try:
            return self._responder.answer(data, client=client, over_tcp=over_tcp)
        except Exception:  # a query that triggers a bug must not stop the service of the others
            log.failure("query failed", client=client, query=data[:512].hex())
            return None

    def _send(self, answer: bytes, control: Control, client: Client) -> None:
        """Send from the address that was queried, and let routing choose the interface."""
        try:
            [(level, kind, info)] = control
            address, _ = _PACKET_INFO.unpack(info)
            self._sockets.udp.sendmsg((answer,), ((level, kind, _PACKET_INFO.pack(address, 0)),), 0, client)
        except OSError as error:  # lost, as any datagram may be: the client retries
            log.debug("sending an answer failed", client=client[0], reason=error.strerror)

    def _forward_datagram(
        self, tasks: asyncio.TaskGroup, upstream: UpstreamQuery, control: Control, client: Client
    ) -> None:
        question = upstream.question
        if self._forwarding >= MAX_FORWARDED:
            self._send(self._failure(question, question.max_size), control, client)
            return

        async def forward() -> None:
            try:
                self._send(await self._forward(upstream, over_tcp=False), control, client)
            finally:
                self._forwarding -= 1

        self._forwarding += 1
        tasks.create_task(forward())

    async def _forward(self, upstream: UpstreamQuery, *, over_tcp: bool) -> bytes:
        max_size = MAX_MESSAGE_SIZE if over_tcp else upstream.question.max_size
        self._responder.statistics.forwarded += 1
        try:
            answer = await self._forwarder.resolve(upstream.query, over_tcp=over_tcp)
            return upstream.complete(answer, max_size=max_size)
        except (Unavailable, Malformed) as error:
            log.debug("forwarding failed", reason=error.message)
        except Exception:  # as in `_answer`
            log.failure("forwarding failed", query=upstream.query.wire_question.hex())
        return self._failure(upstream.question, max_size)

    def _failure(self, question: Question, max_size: int) -> bytes:
        self._responder.statistics.failed += 1
        return encode_answer(question, code=Rcode.SERVFAIL, max_size=max_size)

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff()
        while True:
            try:
                connection, client = await loop.sock_accept(self._sockets.tcp)
            except OSError as error:
                log.warning("accept failed", reason=error.strerror)
                await backoff.pause()
                continue
            backoff.reset()
            # Accepted and closed, not left in the backlog: the client learns at once that it must retry.
            if self._connections >= MAX_TCP_CONNECTIONS:
                connection.close()
                continue
            self._connections += 1
            tasks.create_task(self._serve_tcp(connection, client[0]))

    async def _serve_tcp(self, connection: socket.socket, client: str) -> None:
        """Answer query by query, until the client closes or is idle for too long."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    [length] = _LENGTH.unpack(await _read(connection, _LENGTH.size))
                    data = await _read(connection, length)
                answer = self._answer(data, client, over_tcp=True)
                if answer is None:
                    return
                if isinstance(answer, UpstreamQuery):
                    answer = await self._forward(answer, over_tcp=True)
                async with asyncio.timeout(IDLE_S):
                    await loop.sock_sendall(connection, _LENGTH.pack(len(answer)) + answer)
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("TCP connection closed", client=client, reason=str(error))
        except asyncio.CancelledError:
            # A socket in FIN_WAIT would keep the netns alive until its client answers: reset it instead.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            raise
        finally:
            self._connections -= 1
            connection.close()


async def _read(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError("the client has closed the connection")
        data += part
    return data
