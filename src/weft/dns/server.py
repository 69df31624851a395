"""Serves one tenant's queries over UDP and TCP, on sockets in its netns."""

from __future__ import annotations

import asyncio
import socket
import struct

from weft.dns.encode import encode_answer, encode_error
from weft.dns.forward import Forwarder
from weft.dns.respond import Responder, UpstreamQuery
from weft.dns.shares import Limits, Shares
from weft.dns.tenant_sockets import Sockets
from weft.dns.wire import HEADER_SIZE, MAX_MESSAGE_SIZE, Question, Rcode
from weft.domain.errors import Malformed, Unavailable
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log

log = Log("dns")

# How long a TCP connection may stay without a complete query.
IDLE_S = 10.0
# Limits per tenant and client, so that one cannot take the sockets and memory of all: queries at upstream resolvers,
# which may take seconds each, and TCP connections (RFC 7766 6.2.2 asks for both).
FORWARDED = Limits(room=256, client=64, reserve=4, most=1024)
CONNECTIONS = Limits(room=128, client=16, reserve=2, most=512)
# The same for all tenants of the node. Together they stay below the number of files that netdns may open.
NODE_FORWARDED = Limits(room=4096, client=1024, reserve=64, most=8192)
NODE_CONNECTIONS = Limits(room=2048, client=512, reserve=32, most=4096)
# Datagrams answered before other tenants and tasks get their turn.
_BATCH = 64
# Queries have a name, and EDNS options such as padding. Over TCP a question of 64 KiB could have 6,000 records to read.
MAX_QUERY = 4096
# struct in6_pktinfo: destination address and interface index.
_PACKET_INFO = struct.Struct("=16sI")
_CONTROL_SIZE = socket.CMSG_SPACE(_PACKET_INFO.size)
_LENGTH = struct.Struct("!H")
# struct linger with a timeout of 0: close sends RST.
_LINGER_RESET = struct.pack("ii", 1, 0)

Control = list[tuple[int, int, bytes]]
Client = tuple[str, int, int, int]


class NodeShares:
    """What all tenants of the node share."""

    def __init__(self) -> None:
        self.forwarded = Shares(NODE_FORWARDED)
        self.connections = Shares(NODE_CONNECTIONS)


class TenantServer:
    """Owns the sockets. `run` is the parent of all its tasks."""

    def __init__(
        self, sockets: Sockets, *, responder: Responder, forwarder: Forwarder, node: NodeShares, tenant: str
    ) -> None:
        self._sockets = sockets
        self._responder = responder
        self._forwarder = forwarder
        self._forwarded = Shares(FORWARDED, parent=node.forwarded, name=tenant)
        self._connections = Shares(CONNECTIONS, parent=node.connections, name=tenant)

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
                data, control, _, client = receive(MAX_QUERY, _CONTROL_SIZE)
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
        # Before a task is made for it: what a flood costs beyond its share is one small answer each.
        if not self._forwarded.take(client[0]):
            self._send(self._over_limit(upstream.question, upstream.question.max_size), control, client)
            return

        async def forward() -> None:
            try:
                self._send(await self._forward(upstream, over_tcp=False), control, client)
            finally:
                self._forwarded.give_back(client[0])

        tasks.create_task(forward())

    async def _forward_stream(self, upstream: UpstreamQuery, client: str) -> bytes:
        if not self._forwarded.take(client):
            return self._over_limit(upstream.question, MAX_MESSAGE_SIZE)
        try:
            return await self._forward(upstream, over_tcp=True)
        finally:
            self._forwarded.give_back(client)

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

    def _failure(self, question: Question, max_size: int, *, reason: str = "") -> bytes:
        self._responder.statistics.failed += 1
        return encode_answer(question, code=Rcode.SERVFAIL, reason=reason, max_size=max_size)

    def _over_limit(self, question: Question, max_size: int) -> bytes:
        """SERVFAIL, not REFUSED: a client that waits for its other answers may try again."""
        self._responder.statistics.limited += 1
        reason = f"too many queries in flight: {FORWARDED.client} per client"
        return self._failure(question, max_size, reason=reason)

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
            if self._connections.take(client[0]):
                tasks.create_task(self._serve_tcp(connection, client[0]))
            else:
                self._responder.statistics.connections_limited += 1
                connection.close()
            # `sock_accept` returns at once while clients are waiting: a flood of them would never let the loop go on.
            await asyncio.sleep(0)

    async def _serve_tcp(self, connection: socket.socket, client: str) -> None:
        """Answer query by query, until the client closes or is idle for too long."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    [length] = _LENGTH.unpack(await _read(connection, _LENGTH.size))
                    data = await _read(connection, length if length <= MAX_QUERY else HEADER_SIZE)
                if length > MAX_QUERY:
                    await self._reject_long_query(connection, data)
                    return
                answer = self._answer(data, client, over_tcp=True)
                if answer is None:
                    return
                if isinstance(answer, UpstreamQuery):
                    answer = await self._forward_stream(answer, client)
                async with asyncio.timeout(IDLE_S):
                    await loop.sock_sendall(connection, _LENGTH.pack(len(answer)) + answer)
                # Reads and writes return at once while there is data and room: a client that pipelines queries without
                # end would be the only one that is served, in all tenants.
                await asyncio.sleep(0)
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("TCP connection closed", client=client, reason=str(error))
        except asyncio.CancelledError:
            # A socket in FIN_WAIT would keep the netns alive until its client answers: reset it instead.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
            raise
        finally:
            self._connections.give_back(client)
            connection.close()

    async def _reject_long_query(self, connection: socket.socket, header: bytes) -> None:
        self._responder.statistics.invalid += 1
        answer = encode_error(header, Rcode.FORMERR)
        async with asyncio.timeout(IDLE_S):
            await asyncio.get_running_loop().sock_sendall(connection, _LENGTH.pack(len(answer)) + answer)


async def _read(connection: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        part = await loop.sock_recv(connection, size - len(data))
        if not part:
            raise EOFError("the client has closed the connection")
        data += part
    return data
