"""Serves the embedded store to agents, over a unix socket or mutual TLS, and authenticates their nodes.

Over TLS, the client certificate names the node. On the unix socket, a header does: it is trusted there, because only
root and our own user may connect.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from aiohttp import web

from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Denied, Invalid, Malformed, WeftError
from weft.domain.ids import MAX_LONG_NAME, NodeName, StoreKey, check_name
from weft.domain.store_types import DeleteAll, LeaseId, PrefixUnchangedSince, Revision
from weft.master.nodes.node_authorizer import NodeAuthorizer
from weft.master.nodes.node_quota import NodeQuotas
from weft.ports.store import Entry, Listing, Store
from weft.runtime.admission import Guard, Limits
from weft.runtime.backoff import Backoff
from weft.runtime.http import Handler, serving, status_of
from weft.runtime.join_wire import named_by
from weft.runtime.listener import Tls
from weft.runtime.logs import Log
from weft.runtime.server_tls import ServerTls
from weft.runtime.store import wire
from weft.runtime.tasks import background
from weft.runtime.unix import check_caller

log = Log("store-server")

T = TypeVar("T")

# Limits of what a node may send. A body holds a commit of 100 writes with room to spare.
MAX_BODY = 4 << 20
MAX_KEY = 1024
MAX_REVISION = 2**62
MAX_TTL = 86_400.0
# Room for 5,000 nodes: an agent has a watch and up to three more connections.
STORE_LIMITS = Limits(connections=20_000, per_source=64)
# Seconds after which a watch is closed whose client does not read; it would buffer changes without end.
_STALLED_S = 30.0


class StoreServer:
    """The HTTP application; `runtime.store.wire` defines its calls."""

    def __init__(self, store: Store, guard: Guard, *, quotas: NodeQuotas | None = None) -> None:
        self._store = store
        self._guard = guard
        self._quotas = quotas
        self._watchers: set[asyncio.Task[object]] = set()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_faults, self._guard.middleware()], client_max_size=MAX_BODY)
        calls: dict[str, Handler] = {
            "read": _handler(wire.KeyRequest, self._read),
            "list": _handler(wire.KeyRequest, self._list),
            "commit": _handler(wire.CommitRequest, self._commit),
            "grant": _handler(wire.GrantRequest, self._grant),
            "keep-alive": _handler(wire.LeaseRequest, self._keep_alive),
            "revoke": _handler(wire.LeaseRequest, self._revoke),
            "watch": self._watch,
        }
        for name, handler in calls.items():
            app.router.add_post(f"{wire.PREFIX}/{name}", handler)
        app.on_shutdown.append(self._end_watches)
        return app

    # Reads need no authorization: every agent mirrors the whole store.

    async def _read(self, _: NodeName, request: wire.KeyRequest) -> Entry | None:
        return await self._store.read(_checked(request.key))

    async def _list(self, _: NodeName, request: wire.KeyRequest) -> Listing:
        return await self._store.list(_checked(request.key))

    async def _commit(self, node: NodeName, request: wire.CommitRequest) -> Revision:
        # The store trusts its callers, so everything that comes from a node is checked here.
        for operation in (*request.compares, *request.writes):
            _checked(operation.prefix if isinstance(operation, PrefixUnchangedSince | DeleteAll) else operation.key)
        for compare in request.compares:
            _check_revision(compare.since if isinstance(compare, PrefixUnchangedSince) else compare.revision)
        return await NodeAuthorizer(self._store, node, quotas=self._quotas).commit(request.compares, request.writes)

    async def _grant(self, node: NodeName, request: wire.GrantRequest) -> LeaseId:
        if not 0 < request.ttl <= MAX_TTL:
            raise Invalid(f"the TTL of a lease is at most {MAX_TTL:.0f} s, not {request.ttl}", field="ttl")
        return await NodeAuthorizer(self._store, node, quotas=self._quotas).grant(request.ttl)

    async def _keep_alive(self, node: NodeName, request: wire.LeaseRequest) -> None:
        await NodeAuthorizer(self._store, node, quotas=self._quotas).keep_alive(request.lease)

    async def _revoke(self, node: NodeName, request: wire.LeaseRequest) -> None:
        await NodeAuthorizer(self._store, node, quotas=self._quotas).revoke(request.lease)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        authenticate_node(request)
        watch = await _decoded(request, wire.WatchRequest)
        prefix = _checked(watch.prefix)
        _check_revision(watch.since)
        stream = web.StreamResponse(headers={"Content-Type": wire.MEDIA_TYPE})
        await stream.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        # Remembered for shutdown: aiohttp would wait for an open watch until its timeout.
        self._watchers.add(task)
        try:
            async with (
                aclosing(self._store.watch(prefix, watch.since)) as changes,
                background(_send_heartbeats(stream), name="heartbeat"),
            ):
                await _write(stream, wire.HEARTBEAT_FRAME)  # the client knows now that the watch is established
                async for change in changes:
                    await _write(stream, wire.framed(wire.Frame(change=change)))
        except WeftError as error:
            # The status is sent already, so the error is a frame of the stream.
            await _write(stream, wire.framed(wire.Frame(fault=wire.fault_of(error))))
        except (ConnectionError, TimeoutError):
            pass  # the client disconnected; it reconnects by itself
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
    tls: Tls = None,
    guard: Guard | None = None,
    grace: float = 2.0,
    quotas: NodeQuotas | None = None,
) -> AsyncIterator[None]:
    """Serve the store while the block runs: on a unix socket that only our user may open, and on TCP with mutual TLS.

    `tls` must require client certificates; without it only the unix socket is served.
    """
    required = tls.requires_client_certificates if isinstance(tls, ServerTls) else _requires_certificates(tls)
    if addresses and not required:
        raise Invalid("the store is served on TCP only with TLS that requires client certificates")
    guard = guard or Guard("store", STORE_LIMITS)
    app = StoreServer(store, guard, quotas=quotas).app()
    async with serving(app, addresses, tls=tls, guard=guard, unix=unix, grace=grace):
        yield


def _requires_certificates(tls: ssl.SSLContext | None) -> bool:
    return tls is not None and tls.verify_mode is ssl.CERT_REQUIRED


def _handler(
    kind: type[T], call: Callable[[NodeName, T], Awaitable[object]]
) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def handle(request: web.Request) -> web.Response:
        node = authenticate_node(request)
        reply = await call(node, await _decoded(request, kind))
        return web.Response(body=wire.encode(reply), content_type=wire.MEDIA_TYPE)

    return handle


def authenticate_node(request: web.Request) -> NodeName:
    """The name of the node that sent a request, or `Denied`."""
    transport = request.transport
    if transport is None:
        raise Denied("the connection is closed")
    if transport.get_extra_info("sslcontext") is not None:
        # Verified by the TLS handshake: the server's context requires a certificate of our CA.
        name = _certificate_name(transport.get_extra_info("peercert"))
    else:
        check_peer(transport.get_extra_info("socket"))
        name = request.headers.get(wire.NODE_HEADER, "")
    try:
        return NodeName(check_name(name, field="node", limit=MAX_LONG_NAME))
    except Invalid as error:
        raise Denied(f"the client names no node: {error.message}") from error


def _certificate_name(certificate: object) -> str:
    """The name in a certificate as `ssl.SSLSocket.getpeercert` returns it; empty without a node SAN or CN."""
    if not isinstance(certificate, dict):
        return ""
    subject = [pair for rdn in certificate.get("subject", ()) for pair in rdn]
    return named_by(
        (value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"),
        (value for kind, value in subject if kind == "commonName"),
        units=[value for kind, value in subject if kind == "organizationalUnitName"],
    )


def check_peer(peer: socket.socket | None) -> None:
    """`Denied` unless the peer of a unix socket is root or our own user (`SO_PEERCRED`)."""
    if peer is None or peer.family != socket.AF_UNIX:
        raise Denied("nodes must connect over TLS with a certificate, or over the unix socket")
    check_caller(peer)


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
    except Exception:  # the outermost frame of a request: details go to the log, not to the client
        log.failure("request failed", path=request.path)
        return _fault(WeftError("internal error: see the log of netmaster"), 500)


def _fault(error: WeftError, status: int) -> web.Response:
    return web.Response(body=wire.encode(wire.fault_of(error)), status=status, content_type=wire.MEDIA_TYPE)


async def _decoded(request: web.Request, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(await request.read(), type=kind)
    except UNDECODABLE as error:
        raise Malformed(f"malformed request: {error}") from error


def _checked(key: StoreKey) -> StoreKey:
    if len(key) > MAX_KEY or not key.isascii() or not key.isprintable():
        raise Invalid(f"a key has up to {MAX_KEY} printable ASCII characters, unlike {key[:80]!r}", field="key")
    return key


def _check_revision(revision: Revision) -> None:
    if not 0 <= revision <= MAX_REVISION:
        raise Invalid(f"{revision} is not a revision", field="revision")


async def _send_heartbeats(stream: web.StreamResponse) -> None:
    # An idle watch and a dead server look the same to the client without these.
    pace = Backoff(first=wire.HEARTBEAT, cap=wire.HEARTBEAT)
    while True:
        await pace.pause()
        await _write(stream, wire.HEARTBEAT_FRAME)


async def _write(stream: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(_STALLED_S):
        await stream.write(data)
