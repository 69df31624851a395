"""Followers forward to the leader; whoever is asked, the leader answers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web
from yarl import URL

from weft.domain.errors import Unavailable
from weft.runtime.backoff import Backoff
from weft.runtime.tasks import background

FORWARDED = "X-Weft-Forwarded"
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length", "trailer"}
# Which page asks was judged where it came in.
_NOT_SENT_ON = _HOP_BY_HOP | {"origin"}
# How long a request waits for a leader to be there.
WITHIN_S = 10.0
# How long a leader may say nothing in an answer: a restore is its longest thought, and watches are never so quiet.
SILENCE_S = 120.0
# How often to see whether the leader that was asked still leads; one that hangs would never answer.
LOOK_S = 0.5
_LOST = "the leader was lost during the request: it may or may not have happened"


class Forwarder:
    """Sends requests on to whoever leads. A request that was sent and not answered is never sent again."""

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
        self._tls: ssl.SSLContext | bool = ssl.create_default_context(cafile=str(tls_ca)) if tls_ca else True
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session:
            await self._session.close()

    async def forward(self, request: web.Request) -> web.StreamResponse | None:
        """The leader's answer, or `Unavailable`; None when it is for us to answer, as we lead or have come to lead."""
        backoff = Backoff(first=0.05, cap=0.5, within=WITHIN_S)
        reason = "nobody leads"
        while not self._is_leader():
            leader = self._leader()
            if leader and leader != self._own:
                if FORWARDED in request.headers:
                    raise Unavailable("this netmaster does not lead any more: try again")  # never in circles (W9)
                try:
                    return await self._send(request, leader)
                except aiohttp.ClientConnectorError as error:
                    reason = str(error)  # never sent: the leader is going, the next one may take it
                except (aiohttp.ClientError, ConnectionError) as error:
                    raise Unavailable(_LOST) from error
            try:
                await backoff.pause()
            except TimeoutError as error:
                raise Unavailable(f"no leader answered within {WITHIN_S:g} s: {reason}") from error
        return None

    async def _send(self, request: web.Request, leader: str) -> web.StreamResponse:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=3, sock_read=SILENCE_S)
            self._session = aiohttp.ClientSession(timeout=timeout)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_SENT_ON}
        headers[FORWARDED] = self._own
        url = URL(f"{self._scheme}://{leader}{request.raw_path}", encoded=True)
        body = request.content if request.body_exists else None  # passed on as it comes: a backup may be large
        async with background(self._notice_loss(leader), name=f"leader {leader}"):
            answer = await self._session.request(
                request.method, url, data=body, headers=headers, ssl=self._tls, allow_redirects=False
            )
        async with answer:
            response = web.StreamResponse(status=answer.status)
            for name, value in answer.headers.items():
                if name.lower() not in _HOP_BY_HOP:
                    response.headers[name] = value
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            try:
                async with background(self._notice_loss(leader), name=f"leader {leader}"):
                    async for chunk in answer.content.iter_any():
                        await response.write(chunk)
            except (aiohttp.ClientError, asyncio.IncompleteReadError, Unavailable):
                if request.transport:
                    request.transport.abort()  # a cut answer must look cut
            return response

    async def _notice_loss(self, leader: str) -> None:
        """Fail with `Unavailable` soon after somebody else, or nobody, leads."""
        pace = Backoff(first=LOOK_S, cap=LOOK_S)
        while self._leader() == leader:
            await pace.pause()
        raise Unavailable(_LOST)
