"""HTTP client with failover between servers that provide the same service."""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from types import TracebackType
from typing import NamedTuple, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp

from weft.domain.errors import Invalid, Unavailable
from weft.runtime.backoff import Backoff
from weft.runtime.client_tls import ClientTls

T = TypeVar("T")

# Seconds of retries before a call fails with `Unavailable`.
RETRY_TIMEOUT_S = 6.0
_CONNECT_TIMEOUT_S = 1.0
# Seconds until a response must begin; then another server is tried, if the request is repeatable.
_RESPONSE_TIMEOUT_S = 2.5

_MAX_UNCHUNKED = 2**20
_UNIX, _TLS = "unix:", "https:"
# Errors before the request was sent: the server cannot have acted on it.
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


class TryNextServer(Exception):
    """Raised by a response parser: this server did not act, but another one, or the same one later, may."""


@dataclass(frozen=True, slots=True)
class _Server:
    name: str
    base: str
    session: aiohttp.ClientSession


class Stream(NamedTuple):
    """A streamed response: its status, and its body in chunks."""

    status: int
    pieces: AsyncIterator[bytes]


class Servers:
    """The servers, and the current one. When it fails, the next one becomes current, until that fails too.

    Endpoints are URLs, or `unix:PATH`. Opened and closed as an async context manager.
    """

    def __init__(
        self, endpoints: Sequence[str], *, tls: ClientTls | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        if not endpoints:
            raise Invalid("no endpoint: specify at least one server")
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
        parse: Callable[[int, bytes], T],
        repeatable: bool,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        response_timeout: float | None = None,
    ) -> T:
        """Send a request; `parse` converts the status and body of the response.

        A request that certainly was not executed is retried, on one server after the other, until the timeout. One that
        may have been executed is retried only if it is `repeatable`; otherwise `Unavailable` is raised.
        `response_timeout` is for responses that take long.
        """
        total = response_timeout or (_RESPONSE_TIMEOUT_S if repeatable else RETRY_TIMEOUT_S)
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_TIMEOUT_S)
        # Short pauses: a failover within one election of etcd (about 1 s) should go unnoticed.
        backoff = Backoff(first=0.02, cap=0.5, within=RETRY_TIMEOUT_S)
        attempts = 0
        while True:
            server = self._current_server()
            try:
                async with server.session.request(
                    method, server.base + path, data=_sendable(body), headers=headers, timeout=timeout, ssl=self._ssl()
                ) as answer:
                    return parse(answer.status, await answer.read())
            except (*_NOT_SENT, TryNextServer) as error:
                reason: Exception = error
            except Unavailable:
                self._fail_over(server)  # the parser found it faulty: do not use it for the next request
                raise
            except _BROKEN as error:
                if not repeatable:
                    self._fail_over(server)
                    raise Unavailable(
                        f"{server.name} did not respond, it may have executed the request: {_text(error)}"
                    ) from error
                reason = error
            self._fail_over(server)
            attempts += 1
            if attempts % len(self._endpoints) == 0:  # every server failed once: only then sleep
                try:
                    await backoff.pause()
                except TimeoutError:
                    raise Unavailable(f"no server responds; {server.name}: {_text(reason)}") from reason

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        body: bytes = b"",
        *,
        idle_timeout: float,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Stream]:
        """A streamed response; `Unavailable` when it breaks, or when nothing arrives for `idle_timeout` seconds.

        An idle timeout after the response has begun may just mean that there are no events: the server stays current.
        The block may raise `TryNextServer`.
        """
        server = self._current_server()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=idle_timeout)
        has_begun = False
        try:
            async with asyncio.timeout(_RESPONSE_TIMEOUT_S):
                answer = await server.session.request(
                    method, server.base + path, data=body or None, headers=headers, timeout=timeout, ssl=self._ssl()
                )
            has_begun = True
            async with answer:
                try:
                    yield Stream(answer.status, answer.content.iter_any())
                finally:
                    _abort(answer)
        except (*_BROKEN, TryNextServer) as error:
            if not (has_begun and isinstance(error, TimeoutError)):
                self._fail_over(server)
            raise Unavailable(f"{server.name}: {_text(error)}") from error

    async def __aenter__(self) -> Self:
        for endpoint in self._endpoints:
            connector: aiohttp.BaseConnector
            if endpoint.startswith(_UNIX):
                # limit=0: watches hold connections permanently, and must not block other requests.
                connector = aiohttp.UnixConnector(endpoint.removeprefix(_UNIX), limit=0)
                base = "http://weft"
            else:
                uses_system_ca = self._tls is None and endpoint.lower().startswith(_TLS)
                tls = ssl.create_default_context() if uses_system_ca else True
                connector = aiohttp.TCPConnector(ssl=tls, limit=0)
                base = endpoint.rstrip("/")
            session = aiohttp.ClientSession(
                # No cookies, and bodies as they are: the servers are ours.
                connector=connector,
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
            )
            await self._closing.enter_async_context(session)
            self._servers.append(_Server(endpoint, base, session))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._servers.clear()
        await self._closing.aclose()

    def _ssl(self) -> ssl.SSLContext | bool:
        """For each request: the files may have changed. True is what the connector has."""
        return self._tls.current() if self._tls else True

    def _current_server(self) -> _Server:
        if not self._servers:
            raise Unavailable("the HTTP client is not open: enter it first")
        return self._servers[self._current]

    def _fail_over(self, server: _Server) -> None:
        # Many requests may fail at once: only the first of them switches to the next server.
        if self._servers and self._servers[self._current] is server:
            self._current = (self._current + 1) % len(self._servers)


def _abort(answer: aiohttp.ClientResponse) -> None:
    """Close the connection of an unfinished response. A TLS shutdown would wait for the peer's close_notify."""
    if answer.connection is not None and answer.connection.transport is not None:
        answer.connection.transport.abort()


def is_plain(url: str) -> bool:
    """Whether the URL is of HTTP without TLS: a client certificate is not used there."""
    return urlsplit(url).scheme.lower() == "http"


def is_exposed(url: str) -> bool:
    """Whether credentials sent to this URL could be read on the way: plain HTTP to another machine."""
    if not is_plain(url):
        return False
    host = urlsplit(url).hostname or ""
    try:
        return not ip_address(host).is_loopback
    except ValueError:
        return host.lower() != "localhost"  # a name may resolve to any address


def _sendable(body: bytes) -> bytes | io.BytesIO | None:
    """aiohttp warns of a large bytes body, because sending it blocks the loop; a file object is sent in chunks."""
    if not body:
        return None
    return body if len(body) <= _MAX_UNCHUNKED else io.BytesIO(body)


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
