"""Questions about the outside: asked of the resolvers in turn, before a deadline, and only a true answer is believed.

Each try has a socket of its own, connected, so that the kernel lets in nothing but what comes from whom we asked, to a
port nobody can guess; number and question must be ours too. The same question is never under way twice: it cannot be
used to raise the odds of a forged answer, and a resolver that leads back to us is stopped at its first step.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct

from weft.dns.encode import adapt_answer, encode_answer, encode_question
from weft.dns.upstream import Upstream, Upstreams
from weft.dns.wire import LARGEST_MESSAGE, TC, Code, Question, check_answer
from weft.domain.errors import Malformed, Unavailable

# How long a questioner waits for us at most: the C library's patience is 5 s.
WITHIN_S = 4.0
_GOOD = {Code.NOERROR, Code.NXDOMAIN}
_LENGTH = struct.Struct("!H")

# What is sent, but for its number and the case of its letters, and how.
_Key = tuple[bytes, bool]


class Forwarder:
    """Asks for one tenant."""

    def __init__(self, upstreams: Upstreams) -> None:
        self._upstreams = upstreams
        self._under_way: dict[_Key, asyncio.Future[bytes | None]] = {}

    async def ask(self, question: Question, *, over_tcp: bool) -> bytes:
        """The answer, as it is to be sent; `Unavailable` when nobody could give one."""
        key = (encode_question(question, number=0).lower(), over_tcp)
        shared = self._under_way.get(key)
        if shared is not None:
            answer = await asyncio.shield(shared)
        else:
            answer = await self._ask_for_all(key, question, over_tcp=over_tcp)
        if answer is None:
            raise Unavailable("no resolver has answered")
        if not over_tcp and len(answer) > question.room:
            return encode_answer(question, flags=TC, room=question.room)
        return adapt_answer(answer, question)

    async def _ask_for_all(self, key: _Key, question: Question, *, over_tcp: bool) -> bytes | None:
        """Ask, and let all who come meanwhile with the same question have the answer too."""
        shared = self._under_way[key] = asyncio.get_running_loop().create_future()
        try:
            answer = await self._ask_in_turn(question, over_tcp=over_tcp)
            shared.set_result(answer)
            return answer
        finally:
            del self._under_way[key]
            shared.cancel()

    async def _ask_in_turn(self, question: Question, *, over_tcp: bool) -> bytes | None:
        """The first good answer, else the last one of any kind; a resolver that refuses may know less than the next."""
        upstreams = self._upstreams.current()
        ask = _ask_by_tcp if over_tcp else _ask_by_udp
        answer: bytes | None = None
        for upstream in upstreams:
            try:
                async with asyncio.timeout(WITHIN_S / len(upstreams)):
                    answer, code = await ask(upstream, question)
            except (OSError, TimeoutError, Malformed, asyncio.IncompleteReadError):
                continue
            if code in _GOOD:
                return answer
        return answer


async def _ask_by_udp(upstream: Upstream, question: Question) -> tuple[bytes, int]:
    loop = asyncio.get_running_loop()
    number = secrets.randbits(16)
    with socket.socket(_family(upstream), socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        await loop.sock_connect(asking, (upstream.host, upstream.port))
        await loop.sock_sendall(asking, encode_question(question, number=number))
        while True:
            answer = await loop.sock_recv(asking, LARGEST_MESSAGE)
            try:
                return answer, check_answer(answer, number=number, question=question)
            except Malformed:
                continue  # a forgery, or an answer that comes too late; the true one may still come


async def _ask_by_tcp(upstream: Upstream, question: Question) -> tuple[bytes, int]:
    number = secrets.randbits(16)
    reader, writer = await asyncio.open_connection(upstream.host, upstream.port)
    try:
        asked = encode_question(question, number=number)
        writer.write(_LENGTH.pack(len(asked)) + asked)
        answer = await reader.readexactly(*_LENGTH.unpack(await reader.readexactly(_LENGTH.size)))
    finally:
        writer.close()
    return answer, check_answer(answer, number=number, question=question)


def _family(upstream: Upstream) -> int:
    return socket.AF_INET6 if ":" in upstream.host else socket.AF_INET
