"""Forwards queries to upstream resolvers, one after the other within a deadline, and validates their answers.

Each try has a connected socket of its own: the kernel accepts only packets from that upstream, on a random port. Id and
question must match too. The same question is never in flight twice: repeating it cannot raise the odds of a forged
answer (RFC 5452), and a resolver that forwards to us is stopped at its first step.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct

from weft.dns.encode import adapt_answer, encode_answer, encode_question
from weft.dns.upstream import Upstream, Upstreams
from weft.dns.wire import TC, Question, Rcode, check_answer
from weft.domain.errors import Malformed, Unavailable

# For all upstreams together. glibc gives up after 5 s: an answer must be on its way before that.
FORWARD_TIMEOUT_S = 4.0
# More bad answers than this to one query are an attack, and each one is a chance to guess right (RFC 5452 9.2).
_MAX_FORGED = 32
# We ask for 1,232 bytes at most. Some resolvers ignore that; the largest answers over UDP that anybody sends are these.
_MAX_UDP_ANSWER = 4096
_GOOD = {Rcode.NOERROR, Rcode.NXDOMAIN}
_LENGTH = struct.Struct("!H")

# The query as it is sent, without its id and in lower case, and whether over TCP.
_Key = tuple[bytes, bool]


class Forwarder:
    """Forwards the queries of one tenant."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._in_flight: dict[_Key, asyncio.Future[bytes | None]] = {}

    async def resolve(self, question: Question, *, over_tcp: bool) -> bytes:
        """The answer, ready to be sent; `Unavailable` when no upstream gave one."""
        key = (encode_question(question, msg_id=0).lower(), over_tcp)
        shared = self._in_flight.get(key)
        if shared is not None:
            # The shield keeps one client that leaves from cancelling the query of the others.
            answer = await asyncio.shield(shared)
        else:
            answer = await self._resolve_shared(key, question, over_tcp=over_tcp)
        if answer is None:
            raise Unavailable("no upstream resolver has answered")
        if not over_tcp and len(answer) > question.max_size:
            return encode_answer(question, flags=TC, max_size=question.max_size)
        return adapt_answer(answer, question)

    async def _resolve_shared(self, key: _Key, question: Question, *, over_tcp: bool) -> bytes | None:
        """Query, and share the answer with all clients that ask the same in the meantime."""
        shared = self._in_flight[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._try_upstreams(question, over_tcp=over_tcp)
            shared.set_result(answer)
            return answer
        finally:
            del self._in_flight[key]
            shared.cancel()

    async def _try_upstreams(self, question: Question, *, over_tcp: bool) -> bytes | None:
        """The first good answer, else the last of any kind: an upstream that refuses may know less than the next."""
        upstreams = self._upstreams.current()
        query = _query_tcp if over_tcp else _query_udp
        answer: bytes | None = None
        for upstream in upstreams:
            try:
                async with asyncio.timeout(FORWARD_TIMEOUT_S / len(upstreams)):
                    answer, rcode = await query(upstream, question)
            except (OSError, TimeoutError, Malformed, asyncio.IncompleteReadError):
                continue
            if rcode in _GOOD:
                return answer
        return answer


async def _query_udp(upstream: Upstream, question: Question) -> tuple[bytes, int]:
    loop = asyncio.get_running_loop()
    msg_id = secrets.randbits(16)
    with socket.socket(_family(upstream), socket.SOCK_DGRAM) as udp:
        udp.setblocking(False)
        await loop.sock_connect(udp, (upstream.host, upstream.port))
        await loop.sock_sendall(udp, encode_question(question, msg_id=msg_id))
        for _ in range(_MAX_FORGED):
            answer = await loop.sock_recv(udp, _MAX_UDP_ANSWER)
            try:
                return answer, check_answer(answer, msg_id=msg_id, question=question)
            except Malformed:
                # Forged, or late for an earlier query: the true answer may still come. `sock_recv` returns at once
                # while there are datagrams: without a pause a flood of them would stop all tenants.
                await asyncio.sleep(0)
    raise Malformed("too many forged answers")


async def _query_tcp(upstream: Upstream, question: Question) -> tuple[bytes, int]:
    msg_id = secrets.randbits(16)
    reader, writer = await asyncio.open_connection(upstream.host, upstream.port)
    try:
        query = encode_question(question, msg_id=msg_id)
        writer.write(_LENGTH.pack(len(query)) + query)
        answer = await reader.readexactly(*_LENGTH.unpack(await reader.readexactly(_LENGTH.size)))
    finally:
        writer.close()
    return answer, check_answer(answer, msg_id=msg_id, question=question)


def _family(upstream: Upstream) -> int:
    return socket.AF_INET6 if ":" in upstream.host else socket.AF_INET
