"""Serves the store to the agents, over a unix socket or TLS with client certificates."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from weft.domain.errors import Invalid, Malformed, Unavailable, WeftError
from weft.domain.ids import NodeName, StoreKey
from weft.domain.store_types import DeleteAll, LeaseId, PrefixUnchangedSince, Revision
from weft.master.nodes.node_authn import node_of
from weft.master.nodes.node_authorizer import NodeStore
from weft.ports.store import Entry, Listing, Store
from weft.runtime.backoff import Backoff
from weft.runtime.http import Handler, status_of
from weft.runtime.logs import Log
from weft.runtime.store import wire
from weft.runtime.tasks import background
from weft.runtime.unix import listen_privately

log = Log("store-server")

T = TypeVar("T")

MAX_BODY = 4 << 20
MAX_KEY = 1024
MAX_REVISION = 2**62
MAX_TTL = 86_400.0
# Seconds after which a watcher that does not read is left.
_STALLED = 30.0


class StoreServer:
    """The store as an application of its own; see `runtime.store_wire` for the calls."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._watchers: set[asyncio.Task[object]] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_faults], client_max_size=MAX_BODY)
        calls: dict[str, Handler] = {
            "read": _answering(wire.KeyRequest, self._read),
            "list": _answering(wire.KeyRequest, self._list),
            "commit": _answering(wire.CommitRequest, self._commit),
            "grant": _answering(wire.GrantRequest, self._grant),
            "keep-alive": _answering(wire.LeaseRequest, self._keep_alive),
            "revoke": _answering(wire.LeaseRequest, self._revoke),
            "watch": self._watch,
        }
        for name, handler in calls.items():
            app.router.add_post(f"{wire.PREFIX}/{name}", handler)
        app.on_shutdown.append(self._end_watches)
        return app

    async def _read(self, _: NodeName, request: wire.KeyRequest) -> Entry | None:
        return await self._store.read(_checked(request.key))

    async def _list(self, _: NodeName, request: wire.KeyRequest) -> Listing:
        return await self._store.list(_checked(request.key))

    async def _commit(self, node: NodeName, request: wire.CommitRequest) -> Revision:
        for part in (*request.compares, *request.writes):
            _checked(part.prefix if isinstance(part, PrefixUnchangedSince | DeleteAll) else part.key)
        for compare in request.compares:
            _check_revision(compare.since if isinstance(compare, PrefixUnchangedSince) else compare.revision)
        return await NodeStore(self._store, node).commit(request.compares, request.writes)

    async def _grant(self, node: NodeName, request: wire.GrantRequest) -> LeaseId:
        if not 0 < request.ttl <= MAX_TTL:
            raise Invalid(f"a lease lives up to {MAX_TTL:.0f} s, not {request.ttl}", field="ttl")
        return await NodeStore(self._store, node).grant(request.ttl)

    async def _keep_alive(self, node: NodeName, request: wire.LeaseRequest) -> None:
        await NodeStore(self._store, node).keep_alive(request.lease)

    async def _revoke(self, node: NodeName, request: wire.LeaseRequest) -> None:
        await NodeStore(self._store, node).revoke(request.lease)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        node_of(request)
        asked = await _decoded(request, wire.WatchRequest)
        prefix = _checked(asked.prefix)
        _check_revision(asked.since)
        stream = web.StreamResponse(headers={"Content-Type": wire.MEDIA_TYPE})
        await stream.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._watchers.add(task)
        try:
            async with (
                aclosing(self._store.watch(prefix, asked.since)) as changes,
                background(_show_life(stream), name="signs of life"),
            ):
                await _write(stream, wire.SIGN_OF_LIFE)  # the watch stands
                async for change in changes:
                    await _write(stream, wire.framed(wire.Frame(change=change)))
        except WeftError as error:
            await _write(stream, wire.framed(wire.Frame(fault=wire.fault_of(error))))
        except (ConnectionError, TimeoutError):
            pass  # the watcher has gone; it comes back by itself
        finally:
            self._watchers.discard(task)
        return stream

    async def _end_watches(self, _: web.Application) -> None:
        for watcher in self._watchers:
            watcher.cancel()


@asynccontextmanager
async def serving_store(
    store: Store,
    *,
    unix: Path | None = None,
    addresses: tuple[tuple[str, int], ...] = (),
    tls: ssl.SSLContext | None = None,
    grace: float = 2.0,
) -> AsyncIterator[None]:
    """Serve the store while the block runs: on a socket that only our user may open, and to nodes with certificates.

    `tls` must demand client certificates; without it nothing but the socket is served.
    """
    if addresses and (tls is None or tls.verify_mode is not ssl.CERT_REQUIRED):
        raise Invalid("the store is served on TCP only with TLS that demands client certificates")
    runner = web.AppRunner(StoreServer(store).app(), access_log=None, handle_signals=False, shutdown_timeout=grace)
    await runner.setup()
    async with AsyncExitStack() as undo:
        undo.push_async_callback(runner.cleanup)
        try:
            if unix is not None:
                listener = listen_privately(unix)
                undo.callback(unix.unlink, missing_ok=True)
                await web.SockSite(runner, listener).start()
            for host, port in addresses:
                await web.TCPSite(runner, host, port, ssl_context=tls, reuse_address=True).start()
        except OSError as error:
            raise Unavailable(f"the store cannot be served: {error}") from error
        yield


def _answering(
    kind: type[T], call: Callable[[NodeName, T], Awaitable[object]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        node = node_of(request)
        answer = await call(node, await _decoded(request, kind))
        return web.Response(body=wire.encode(answer), content_type=wire.MEDIA_TYPE)

    return handle


@web.middleware
async def _errors_as_faults(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except WeftError as error:
        return _fault(error, status_of(error))
    except web.HTTPException as error:
        return _fault(Invalid(error.reason), error.status)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:  # the outermost loop of a request: told in the log, not to the caller
        log.failure("request failed", path=request.path)
        return _fault(WeftError("internal error: see the log of netmaster"), 500)


def _fault(error: WeftError, status: int) -> web.Response:
    return web.Response(body=wire.encode(wire.fault_of(error)), status=status, content_type=wire.MEDIA_TYPE)


async def _decoded(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(await request.read(), type=kind)
    except msgspec.MsgspecError as error:
        raise Malformed(f"the request is not readable: {error}") from error


def _checked(key: StoreKey) -> StoreKey:
    if len(key) > MAX_KEY or not key.isascii() or not key.isprintable():
        raise Invalid(f"a key has up to {MAX_KEY} printable ASCII characters, unlike {key[:80]!r}", field="key")
    return key


def _check_revision(revision: Revision) -> None:
    if not 0 <= revision <= MAX_REVISION:
        raise Invalid(f"{revision} is not a revision", field="revision")


async def _show_life(stream: web.StreamResponse) -> None:
    pace = Backoff(first=wire.HEARTBEAT, cap=wire.HEARTBEAT)
    while True:
        await pace.pause()
        await _write(stream, wire.SIGN_OF_LIFE)


async def _write(stream: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(_STALLED):
        await stream.write(data)
