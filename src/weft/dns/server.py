"""One tenant's questions, by UDP and TCP, from the sockets in its space."""

from __future__ import annotations

import asyncio
import socket
import struct

from weft.dns.encode import encode_answer
from weft.dns.forward import Forwarder
from weft.dns.respond import Responder
from weft.dns.tenant_sockets import Sockets
from weft.dns.upstream_query import Outside
from weft.dns.wire import LARGEST_MESSAGE, Code, Question
from weft.domain.errors import Malformed, Unavailable
from weft.runtime.backoff import Backoff
from weft.runtime.logs import Log

log = Log("dns")

# How long a TCP connection may stay without a whole question.
IDLE_S = 10.0
MOST_CONNECTIONS = 128
# How many questions of a tenant about the outside may be under way.
MOST_FORWARDED = 256
# Datagrams answered before others get their turn.
_AT_A_TIME = 64
_LARGEST_QUESTION = 4096
_PACKET_INFO = struct.Struct("=16sI")
_CONTROL_SIZE = socket.CMSG_SPACE(_PACKET_INFO.size)
_LENGTH = struct.Struct("!H")
_CUT_OFF = struct.pack("ii", 1, 0)

Control = list[tuple[int, int, bytes]]
Client = tuple[str, int, int, int]


class TenantServer:
    """Owns the sockets. Its `run` is the parent of all that it has under way."""

    def __init__(self, sockets: Sockets, *, responder: Responder, forwarder: Forwarder) -> None:
        self._sockets = sockets
        self._responder = responder
        self._forwarder = forwarder
        self._forwarding = 0
        self._connections = 0

    async def run(self) -> None:
        """Serve until cancelled; nothing of ours is left in the space then."""
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
        for _ in range(_AT_A_TIME):
            try:
                data, control, _, client = receive(_LARGEST_QUESTION, _CONTROL_SIZE)
            except BlockingIOError:
                return
            answer = self._answer(data, client[0], over_tcp=False)
            if isinstance(answer, bytes):
                self._send(answer, control, client)
            elif answer is not None:
                self._forward_datagram(tasks, answer, control, client)

    def _answer(self, data: bytes, client: str, *, over_tcp: bool) -> bytes | Outside | None:
        try:
            return self._responder.answer(data, client=client, over_tcp=over_tcp)
        except Exception:  # whatever one questioner makes us stumble over, the others are answered
            log.failure("question not answered", client=client, question=data[:512].hex())
            return None

    def _send(self, answer: bytes, control: Control, client: Client) -> None:
        """From the address that was asked, by whatever interface leads to the client."""
        try:
            [(level, kind, info)] = control
            address, _ = _PACKET_INFO.unpack(info)
            self._sockets.udp.sendmsg((answer,), ((level, kind, _PACKET_INFO.pack(address, 0)),), 0, client)
        except OSError as error:  # lost, as any datagram may be: the client asks again
            log.debug("answer lost", client=client[0], reason=error.strerror)

    def _forward_datagram(self, tasks: asyncio.TaskGroup, outside: Outside, control: Control, client: Client) -> None:
        question = outside.question
        if self._forwarding >= MOST_FORWARDED:
            self._send(self._failure(question, question.room), control, client)
            return

        async def forward() -> None:
            try:
                self._send(await self._forward(outside, over_tcp=False), control, client)
            finally:
                self._forwarding -= 1

        self._forwarding += 1
        tasks.create_task(forward())

    async def _forward(self, outside: Outside, *, over_tcp: bool) -> bytes:
        room = LARGEST_MESSAGE if over_tcp else outside.question.room
        self._responder.statistics.forwarded += 1
        try:
            return outside.complete(await self._forwarder.ask(outside.ask, over_tcp=over_tcp), room=room)
        except (Unavailable, Malformed) as error:
            log.debug("question not forwarded", reason=error.message)
        except Exception:  # as above
            log.failure("question not forwarded", question=outside.ask.asked.hex())
        return self._failure(outside.question, room)

    def _failure(self, question: Question, room: int) -> bytes:
        self._responder.statistics.failed += 1
        return encode_answer(question, code=Code.SERVFAIL, room=room)

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        loop, backoff = asyncio.get_running_loop(), Backoff()
        while True:
            try:
                connection, client = await loop.sock_accept(self._sockets.tcp)
            except OSError as error:
                log.warning("no connection accepted", reason=error.strerror)
                await backoff.pause()
                continue
            backoff.reset()
            if self._connections >= MOST_CONNECTIONS:
                connection.close()
                continue
            self._connections += 1
            tasks.create_task(self._converse(connection, client[0]))

    async def _converse(self, connection: socket.socket, client: str) -> None:
        """Question by question, until the client has no more or takes too long."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    [length] = _LENGTH.unpack(await _read(connection, _LENGTH.size))
                    data = await _read(connection, length)
                answer = self._answer(data, client, over_tcp=True)
                if answer is None:
                    return
                if isinstance(answer, Outside):
                    answer = await self._forward(answer, over_tcp=True)
                async with asyncio.timeout(IDLE_S):
                    await loop.sock_sendall(connection, _LENGTH.pack(len(answer)) + answer)
        except (OSError, EOFError, TimeoutError) as error:
            log.debug("conversation over", client=client, reason=str(error))
        except asyncio.CancelledError:
            # A client that is slow to say goodbye would keep the space alive.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CUT_OFF)
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
            raise EOFError("the client has gone")
        data += part
    return data
