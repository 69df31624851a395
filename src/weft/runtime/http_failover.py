"""HTTP requests to one of several servers that serve the same thing."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import aiohttp

from weft.domain.errors import Invalid, Unavailable
from weft.runtime.backoff import Backoff

T = TypeVar("T")

# Seconds for which a call is tried before it ends with `Unavailable`.
PATIENCE = 6.0
_CONNECTING = 1.0
# Seconds within which an answer must begin, or another server is tried where that does no harm.
_ANSWERING = 2.5

_ONE_PIECE = 2**20
_UNIX, _TLS = "unix:", "https:"
_NEVER_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


class TryNextServer(Exception):
    """Said by the judge of an answer: this server did nothing, but another, or the same later, may do it."""


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    base: str
    session: aiohttp.ClientSession


class Stream(NamedTuple):
    """An answer that goes on: its status, and its body as it comes."""

    status: int
    pieces: AsyncIterator[bytes]


class Servers:
    """The servers, and the one that is used now. One that fails is left for the next, until that fails too.

    Endpoints are URLs, or `unix:PATH`. Opened and closed as an async context manager.
    """

    def __init__(
        self, endpoints: Sequence[str], *, tls: ssl.SSLContext | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if not endpoints:
            raise Invalid("no endpoint is given: name at least one server")
        self._endpoints = endpoints
        self._tls = tls
        self._headers = headers
        self._servers: list[_Server] = []
        self._current = 0
        self._closing = AsyncExitStack()

    async def ask(
        self,
        path: str,
        body: bytes = b"",
        *,
        judge: Callable[[int, bytes], T],
        repeatable: bool,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        answering: float | None = None,
    ) -> T:
        """Send a request; what `judge` makes of the answer's status and body.

        What was surely not carried out is tried again, on one server after another, as long as time permits. What may
        have been carried out is tried again only if it is `repeatable`; else `Unavailable` says that nobody knows.
        `answering` is how many seconds one answer may take where it is long.
        """
        total = answering or (_ANSWERING if repeatable else PATIENCE)
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECTING)
        backoff = Backoff(first=0.02, cap=0.5, within=PATIENCE)
        tries = 0
        while True:
            server = self._now()
            try:
                async with server.session.request(
                    method, server.base + path, data=_sendable(body), headers=headers, timeout=timeout
                ) as answer:
                    return judge(answer.status, await answer.read())
            except (*_NEVER_SENT, TryNextServer) as error:
                reason: Exception = error
            except Unavailable:
                self._leave(server)  # as the judge found; the next request shall have better luck
                raise
            except _BROKEN as error:
                if not repeatable:
                    self._leave(server)
                    raise Unavailable(f"{server.name} did not answer, it may have acted: {_text(error)}") from error
                reason = error
            self._leave(server)
            tries += 1
            if tries % len(self._endpoints) == 0:  # all of them were asked
                try:
                    await backoff.pause()
                except TimeoutError:
                    raise Unavailable(f"no server answers; {server.name}: {_text(reason)}") from reason

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: bytes = b"",
        *,
        silence: float,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Stream]:
        """An answer that goes on; `Unavailable` when it breaks, or when nothing comes for `silence` seconds.

        Silence after the answer has begun may just mean that there is no news, so it does not speak against the server.
        The block may say `TryNextServer`, when what it reads does.
        """
        server = self._now()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECTING, sock_read=silence)
        heard = False
        try:
            async with asyncio.timeout(_ANSWERING):
                answer = await server.session.request(
                    method, server.base + path, data=body or None, headers=headers, timeout=timeout
                )
            heard = True
            async with answer:
                try:
                    yield Stream(answer.status, answer.content.iter_any())
                finally:
                    _cut(answer)
        except (*_BROKEN, TryNextServer) as error:
            if not (heard and isinstance(error, TimeoutError)):
                self._leave(server)
            raise Unavailable(f"{server.name}: {_text(error)}") from error

    async def __aenter__(self) -> Self:
        for endpoint in self._endpoints:
            connector: aiohttp.BaseConnector
            if endpoint.startswith(_UNIX):
                connector = aiohttp.UnixConnector(endpoint.removeprefix(_UNIX), limit=0)
                base = "http://weft"
            else:
                tls = self._tls or (ssl.create_default_context() if endpoint.lower().startswith(_TLS) else True)
                connector = aiohttp.TCPConnector(ssl=tls, limit=0)
                base = endpoint.rstrip("/")
            session = aiohttp.ClientSession(
                connector=connector, headers=self._headers, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
            )
            await self._closing.enter_async_context(session)
            self._servers.append(_Server(endpoint, base, session))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._servers.clear()
        await self._closing.aclose()

    def _now(self) -> _Server:
        if not self._servers:
            raise Unavailable("the servers are not open: enter them first")
        return self._servers[self._current]

    def _leave(self, server: _Server) -> None:
        # Many requests may fail at once: only the first of them moves on.
        if self._servers and self._servers[self._current] is server:
            self._current = (self._current + 1) % len(self._servers)


def _cut(answer: aiohttp.ClientResponse) -> None:
    """End the connection of an answer that has not come to its end. A farewell by TLS would wait for the other side."""
    if answer.connection is not None and answer.connection.transport is not None:
        answer.connection.transport.abort()


def client_tls(*, ca: str, cert: str, key: str) -> ssl.SSLContext | None:
    """What a client needs to trust servers by `ca` and to show `cert`; None when neither is named."""
    if not (ca or cert or key):
        return None
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"the CA {ca} is not usable: {error}") from error
    show_certificate(context, cert=cert, key=key)
    return context


def show_certificate(context: ssl.SSLContext, *, cert: str, key: str) -> None:
    """Have new connections show a certificate as its files are now; without a file of its own, `cert` has the key."""
    if not (cert or key):
        return
    try:
        context.load_cert_chain(cert, key or None)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"the certificate {', '.join(filter(None, (cert, key)))} is not usable: {error}") from error


def _sendable(body: bytes) -> bytes | io.BytesIO | None:
    """aiohttp warns of large bodies in one piece, for they would block the loop; a file is sent piece by piece."""
    if not body:
        return None
    return body if len(body) <= _ONE_PIECE else io.BytesIO(body)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
