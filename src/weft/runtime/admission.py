"""Admission control of an HTTP server: connections and requests per source and in all (docs/operating.md, Limits).

- A connection that has no request in progress may be closed at any time; when a limit is reached, the one that is idle
  for longest is. So no number of silent connections keeps a client out, nor of clients that do not read responses.
- When all of them are busy, a few connections beyond the limit are accepted. Only the health endpoints are served
  there; anything else gets an error that names the limit.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from aiohttp import web
from aiohttp.typedefs import Middleware
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from weft.domain.errors import Limited
from weft.runtime.logs import Log, dropped_records
from weft.runtime.rate_limit import LOCAL, TokenBuckets, source_of

log = Log("admission")

# Served beyond the limits: an operator must see that a server is alive while it is flooded.
HEALTH_PATHS = frozenset({"/healthz", "/readyz", "/version", "/metrics"})
# Connections beyond the limit, for those.
RESERVE = 32
# Seconds for the TLS handshake, and then for the first request.
HANDSHAKE_S = 10.0
# Seconds for a request's body. A backup of 100 MB takes some of them; a client that sends nothing gets no more.
BODY_S = 120.0
# Seconds for which a server that had no file descriptor left takes fewer connections.
OPEN_FILES_S = 60.0
# A server that has closed so many idle connections at once is the one that takes the descriptors.
_MANY_IDLE = 8
# Connections that a server takes with any limit of open files.
_FEWEST = 16
# Seconds for a client to take a response. After that its connection counts as idle: it may never read.
SEND_S = 60.0
# Seconds between two log lines about rejections.
_LOG_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one server. Sources on this machine get more of everything, and so do peers (other masters)."""

    connections: int = 4096
    per_source: int = 256
    per_local: int = 2048
    # Requests a second of one source; twice as many may come at once.
    rate: float = 500.0
    # Bytes of bodies of one source that are being received or worked on.
    body_bytes: int = 32 << 20
    # How much more than another machine a local source or a peer may send.
    local_weight: float = 10.0

    def within(self, open_files: int) -> Limits:
        """The same, with room for other files of the process and for its other servers."""
        return replace(self, connections=max(_FEWEST, min(self.connections, open_files // 4)))


class Connection:
    """One admitted connection. `close` ends it at once."""

    __slots__ = ("busy", "close", "idle_since", "is_open", "over", "pending", "requests", "source")

    def __init__(self, source: str, close: Callable[[], None], *, over: str) -> None:
        self.source = source
        self.close = close
        # Requests so far, and those in progress.
        self.requests = self.busy = 0
        # When the last request ended, by the loop's clock.
        self.idle_since = 0.0
        # The limit that it exceeds; empty for an ordinary one.
        self.over = over
        self.is_open = True
        # Whether part of a response is not sent yet.
        self.pending: Callable[[], bool] = bool


@dataclass(slots=True)
class _Source:
    open: int = 0
    body_bytes: int = 0
    # The one that is idle for longest first.
    idle: dict[Connection, None] = field(default_factory=dict)


class Guard:
    """The admission control of one server."""

    def __init__(self, listener: str, limits: Limits, *, is_peer: Callable[[str], bool] = lambda _: False) -> None:
        """`is_peer` says whether a source is one of our own servers, which forwards the requests of many clients."""
        self.listener = listener
        self.limits = limits
        self._is_peer = is_peer
        self._sources: dict[str, _Source] = {}
        self._idle: dict[Connection, None] = {}
        self._reserve: dict[Connection, None] = {}
        self._by_transport: dict[object, Connection] = {}
        burst = 2 * limits.rate
        self._requests = TokenBuckets(rate=limits.rate, burst=burst)
        # A bucket of their own: a flood of other requests must not make a server look dead.
        self._health_requests = TokenBuckets(rate=limits.rate, burst=burst)
        self.open = 0
        # Numbers by reason, for metrics.
        self.closed: Counter[str] = Counter()
        self.rejected: Counter[str] = Counter()
        # Idle connections that made room for others.
        self.evicted = 0
        self._logged = -math.inf
        # Below `limits.connections` for a while after accept has failed.
        self._most = limits.connections
        self._restore: asyncio.TimerHandle | None = None
        # Without the middleware nobody knows which connections are busy: then none is closed.
        self._counts_requests = False

    # Connections.

    def admit(self, host: str, close: Callable[[], None]) -> Connection | None:
        """Count a new connection; None if it must be closed at once."""
        source = source_of(host)
        state = self._sources.get(source)
        over = ""
        if state and state.open >= self._per_source(source) and not self._evict(state.idle):
            over = "per_source"
        elif self.open >= self._most and not self._evict(self._idle):
            over = "connections"
        connection = Connection(source, close, over=over)
        if over:
            self.closed[over] += 1
            self._log("too many connections", source=source, limit=over)
            if len(self._reserve) >= RESERVE and not self._evict(self._reserve):
                return None
            self._reserve[connection] = None
            return connection
        self.open += 1
        state = self._sources.setdefault(source, _Source())
        state.open += 1
        self._set_idle(connection)
        return connection

    def attach(self, connection: Connection, transport: asyncio.Transport) -> None:
        """The connection is established, after a handshake if there is one."""
        connection.close = transport.abort
        connection.pending = lambda: transport.get_write_buffer_size() > 0
        self._by_transport[transport] = connection
        # aiohttp's own timer begins with the first request.
        asyncio.get_running_loop().call_later(HANDSHAKE_S, self._end_silent, connection)

    def release(self, connection: Connection, transport: object = None) -> None:
        """The connection is closed; idempotent."""
        self._by_transport.pop(transport, None)
        if not connection.is_open:
            return
        connection.is_open = False
        self._reserve.pop(connection, None)
        self._idle.pop(connection, None)
        if not connection.over:
            state = self._sources[connection.source]
            state.idle.pop(connection, None)
            state.open -= 1
            self.open -= 1
            self._forget_unused(connection.source)

    def close_all(self) -> None:
        """Close all connections: their clients must authenticate again."""
        for connection in list(self._by_transport.values()):
            connection.close()

    def make_room(self, reason: str) -> None:
        """The process has no file descriptor left: close a quarter of the idle connections.

        A server with many of them takes no more for a while: the process needs descriptors for its other work too, such
        as the journal of its store.
        """
        excess = math.ceil(len(self._idle) / 4)
        before = self.evicted
        while self.evicted < before + excess and self._evict(self._idle, because="open_files"):
            pass
        if self.evicted - before >= _MANY_IDLE:
            self._most = max(_FEWEST, self.open)
            if self._restore:
                self._restore.cancel()
            self._restore = asyncio.get_running_loop().call_later(OPEN_FILES_S, self._restore_limit)
        self._log("accept failed: raise the limit of open files (RLIMIT_NOFILE)", reason=reason, connections=self._most)

    def _restore_limit(self) -> None:
        self._most = self.limits.connections

    def _per_source(self, source: str) -> int:
        is_ours = source == LOCAL or self._is_peer(source)
        return self.limits.per_local if is_ours else self.limits.per_source

    def _set_idle(self, connection: Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle[connection] = None
        self._sources[connection.source].idle[connection] = None

    def _evict(self, candidates: dict[Connection, None], *, because: str = "idle") -> bool:
        """Close the connection that is idle for longest; whether there was one."""
        stalled = asyncio.get_running_loop().time() - SEND_S
        for connection in candidates:
            is_sending = connection.pending() and connection.idle_since > stalled
            if self._counts_requests and not connection.busy and not is_sending:
                self.release(connection)
                connection.close()
                self.closed[because] += 1
                self.evicted += 1
                return True
        return False

    def _end_silent(self, connection: Connection) -> None:
        if self._counts_requests and connection.is_open and not connection.requests:
            self.closed["silent"] += 1
            connection.close()

    def _forget_unused(self, source: str) -> None:
        state = self._sources.get(source)
        if state and not state.open and not state.body_bytes:
            del self._sources[source]

    # Requests.

    def middleware(self) -> Middleware:
        """The middleware that limits requests. One that turns errors into responses must be outside of it."""

        self._counts_requests = True

        @web.middleware
        async def admitted(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            connection = self._by_transport.get(request.transport)
            if connection is None:
                return await handler(request)  # served without a listener of ours, as in tests
            self._check_rate(request, connection)
            with self._in_progress(connection), self._body_counted(request, connection):
                return await handler(request)

        return admitted

    def _check_rate(self, request: web.Request, connection: Connection) -> None:
        source = connection.source
        is_health = request.path.rstrip("/") in HEALTH_PATHS
        connection.requests += 1
        if connection.over:
            request.protocol.close()  # after this response: the slot is for the next one
            if not is_health:
                raise self.limited(connection.over, f"too many connections: {self._count_of(connection)}")
        buckets = self._health_requests if is_health else self._requests
        weight = self.limits.local_weight if source == LOCAL or self._is_peer(source) else 1.0
        if wait := buckets.take(source, now=asyncio.get_running_loop().time(), weight=weight):
            limit = buckets.rate * weight
            raise self.limited("rate", f"too many requests: {source} may send {limit:g} a second", wait=wait)

    def _count_of(self, connection: Connection) -> str:
        if connection.over == "per_source":
            return f"{connection.source} has {self._per_source(connection.source)}, the limit of one source"
        return f"the server has {self._most}, its limit"

    @contextmanager
    def _in_progress(self, connection: Connection) -> Iterator[None]:
        connection.busy += 1
        self._idle.pop(connection, None)
        if state := self._sources.get(connection.source):
            state.idle.pop(connection, None)
        try:
            yield
        finally:
            connection.busy -= 1
            # Last in line for eviction: it was used just now.
            if connection.is_open and not connection.over and not connection.busy:
                self._set_idle(connection)

    @contextmanager
    def _body_counted(self, request: web.Request, connection: Connection) -> Iterator[None]:
        """Bound the memory and the time that bodies of one source take."""
        if not request.body_exists:
            yield
            return
        # Without a length it may be as large as the server takes.
        most = request.client_max_size
        size = most if request.content_length is None else min(request.content_length, most)
        source = connection.source
        state = self._sources.setdefault(source, _Source())
        limit = self.limits.body_bytes * (self.limits.local_weight if source == LOCAL else 1.0)
        if state.body_bytes + size > limit:
            raise self.limited("body_bytes", f"too many large requests at once: {source} may send {limit:.0f} bytes")
        state.body_bytes += size
        timer = asyncio.get_running_loop().call_later(BODY_S, self._end_slow_body, request, connection)
        try:
            yield
        finally:
            timer.cancel()
            state.body_bytes -= size
            self._forget_unused(source)

    def _end_slow_body(self, request: web.Request, connection: Connection) -> None:
        if not request.content.is_eof():
            self.closed["slow_body"] += 1
            connection.close()

    def limited(self, reason: str, message: str, *, wait: float = 1.0) -> Limited:
        """Count a rejection by a limit; the error for the client."""
        self.rejected[reason] += 1
        self._log("requests rejected", reason=message)
        seconds = max(1, math.ceil(wait))
        return Limited(f"{message}: try again in {seconds} s", details={"limit": reason, "retryAfter": seconds})

    def _log(self, event: str, **fields: object) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._logged > _LOG_EVERY_S:
            self._logged = now
            log.warning(event, listener=self.listener, **fields)


class AdmissionMetrics(Collector):
    """What the limits of a process did: those of its servers, and that of log records that wait."""

    def __init__(self) -> None:
        self._guards: list[Guard] = []
        # Of servers that ended, by listener and reason: a counter must not decrease.
        self._closed: Counter[tuple[str, str]] = Counter()
        self._rejected: Counter[tuple[str, str]] = Counter()

    def add(self, guard: Guard) -> None:
        """Show the numbers of another server. Those of servers with the same name are added up."""
        self._guards.append(guard)

    def remove(self, guard: Guard) -> None:
        """The server has ended."""
        self._guards.remove(guard)
        _count(guard, self._closed, self._rejected)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        # CounterMetricFamily appends `_total` to each name.
        connections = GaugeMetricFamily("weft_connections", "Open connections by server", labels=("listener",))
        closed = CounterMetricFamily(
            "weft_connections_closed",
            "Connections closed by a limit: per_source, connections (all busy), idle, silent, slow_body, open_files",
            labels=("listener", "reason"),
        )
        rejected = CounterMetricFamily(
            "weft_requests_rejected",
            "Requests rejected by a limit: rate, body_bytes, per_source, connections, token_reviews",
            labels=("listener", "reason"),
        )
        open_now: Counter[str] = Counter()
        by_reason, rejections = self._closed.copy(), self._rejected.copy()
        for guard in self._guards:
            open_now[guard.listener] += guard.open
            _count(guard, by_reason, rejections)
        for listener, number in open_now.items():
            connections.add_metric((listener,), number)
        for key, number in by_reason.items():
            closed.add_metric(key, number)
        for key, number in rejections.items():
            rejected.add_metric(key, number)
        yield from (connections, closed, rejected)
        yield CounterMetricFamily(
            "weft_log_records_dropped",
            "Log records that were dropped because the syslog server did not take them",
            value=dropped_records(),
        )


def _count(guard: Guard, closed: Counter[tuple[str, str]], rejected: Counter[tuple[str, str]]) -> None:
    closed.update({(guard.listener, reason): number for reason, number in guard.closed.items()})
    rejected.update({(guard.listener, reason): number for reason, number in guard.rejected.items()})
