"""Proxy to the leader: a follower forwards every request that only the leader may answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from weft.domain.errors import Unavailable
from weft.runtime.backoff import Backoff
from weft.runtime.client_tls import client_tls
from weft.runtime.http_failover import is_exposed
from weft.runtime.tasks import background

FORWARDED = "X-Weft-Forwarded"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length", "trailer"}
# The follower has checked `Origin` against its own address; the leader's is another one.
_NOT_FORWARDED = _HOP_BY_HOP | {"origin"}
# How long a request waits for a leader to be elected.
WITHIN_S = 10.0
# Read timeout: longer than the longest request, a restore. Watches send heartbeats.
READ_TIMEOUT_S = 120.0
# How often to check that the leader is still the same: one that hangs would never answer.
CHECK_S = 0.5
_LOST = "the leader was lost during the request: it may or may not have been executed"


class LeaderProxy:
    """Forwards requests to the leader. A request that was sent is never sent again, as it may have been executed."""

    def __init__(
        self,
        leader: Callable[[], str],
        *,
        is_leader: Callable[[], bool],
        own_address: str,
        tls_ca: Path | None,
        use_tls: bool,
    ) -> None:
        self._leader = leader
        self._is_leader = is_leader
        self._own = own_address
        self._scheme = "https" if use_tls else "http"
        # Read again when it changes: masters get certificates of a new CA while they run.
        self._tls = client_tls(ca=str(tls_ca), cert="", key="") if tls_ca else None
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def forward(self, request: web.Request) -> web.StreamResponse | None:
        """The leader's response, or `Unavailable`; None when this netmaster is, or has become, the leader."""
        backoff = Backoff(first=0.05, cap=0.5, within=WITHIN_S)
        reason = "no leader is elected"
        while not self._is_leader():
            leader = self._leader()
            if leader and leader != self._own:
                # A forwarded request is not forwarded again: during an election two masters could loop (W9).
                if FORWARDED in request.headers:
                    raise Unavailable("this netmaster is no longer the leader: try again")
                # The leader's address comes from the store; the request may have our token in it.
                if "Authorization" in request.headers and is_exposed(f"{self._scheme}://{leader}"):
                    raise Unavailable(
                        f"the leader is at {leader}, and the token would be sent there in clear text: "
                        "give all masters --tls-cert and --tls-key"
                    )
                try:
                    return await self._send(request, leader)
                except aiohttp.ClientConnectorError as error:
                    reason = str(error)  # not sent, so it is safe to try the next leader
                except (aiohttp.ClientError, ConnectionError) as error:
                    raise Unavailable(_LOST) from error
            try:
                await backoff.pause()
            except TimeoutError as error:
                raise Unavailable(f"no leader answered within {WITHIN_S:g} s: {reason}") from error
        return None

    async def _send(self, request: web.Request, leader: str) -> web.StreamResponse:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=READ_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED}
        headers[FORWARDED] = self._own
        url = URL(f"{self._scheme}://{leader}{request.raw_path}", encoded=True)
        body = request.content if request.body_exists else None  # streamed: a backup may be large
        async with background(self._watch_leader(leader), name=f"leader {leader}"):
            tls = self._tls.current() if self._tls else True
            upstream = await self._session.request(
                request.method, url, data=body, headers=headers, ssl=tls, allow_redirects=False
            )
        async with upstream:
            response = web.StreamResponse(status=upstream.status)
            for name, value in upstream.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    response.headers[name] = value
            if upstream.content_length is not None:
                response.content_length = upstream.content_length
            await response.prepare(request)
            try:
                async with background(self._watch_leader(leader), name=f"leader {leader}"):
                    async for chunk in upstream.content.iter_any():
                        await response.write(chunk)
            except (aiohttp.ClientError, asyncio.IncompleteReadError, Unavailable):
                if request.transport:
                    # Abort, do not close: a truncated chunked body must not look complete to the client.
                    request.transport.abort()
            return response

    async def _watch_leader(self, leader: str) -> None:
        """Raise `Unavailable` soon after `leader` is no longer the leader."""
        pace = Backoff(first=CHECK_S, cap=CHECK_S)
        while self._leader() == leader:
            await pace.pause()
        raise Unavailable(_LOST)
