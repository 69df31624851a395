"""A small JSON server on aiohttp: errors as `{code, message, field, details}`, listeners with and without TLS."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from weft.domain.errors import (
    Behind,
    Compacted,
    Conflict,
    Denied,
    Invalid,
    Malformed,
    Mismatch,
    NotFound,
    Unavailable,
    WeftError,
)
from weft.runtime.logs import Log
from weft.runtime.unix import listen_privately

log = Log("http")

# Ample for any object; backups have a limit of their own.
MAX_BODY = 1 << 20
JSON_TYPE = "application/json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The first matching class decides, so subclasses come before their base.
STATUSES: tuple[tuple[type[WeftError], int], ...] = (
    (Mismatch, 412),
    (Conflict, 409),
    (Malformed, 400),
    (Invalid, 422),
    (NotFound, 404),
    (Denied, 403),
    (Compacted, 410),
    (Unavailable, 503),
    (Behind, 504),
)


def status_of(error: WeftError) -> int:
    """The HTTP status of an error."""
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """A response with the value as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, headers=headers, content_type=JSON_TYPE)


def error_response(error: WeftError, *, status: int = 0) -> web.Response:
    """The response for an error; it never contains a traceback."""
    body = {"code": error.code, "message": error.message, "field": error.field, "details": dict(error.details)}
    response = json_response(body, status=status or status_of(error))
    if isinstance(error, Unavailable):
        # A hint for clients such as curl --retry.
        response.headers["Retry-After"] = "1"
    return response


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert every exception of a handler to a JSON body with the right status."""
    try:
        return await handler(request)
    except WeftError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _http_error(error)
    except web.RequestPayloadError:
        return error_response(Malformed("the body does not match its headers"))
    except TimeoutError:
        return error_response(Unavailable("the request took too long: try again"))
    # The client has disconnected: there is no one to respond to.
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:  # the outermost handler of a request: logged, not shown to the caller
        log.failure("request failed", method=request.method, path=request.path)
        return error_response(WeftError("internal error: see the log"), status=500)


@web.middleware
async def own_pages_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Reject cross-origin requests: a browser sends them with the privileges of the user who opened the page."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise Denied(f"cross-origin request from {origin[:100]!r} rejected", field="Origin")
    return await handler(request)


def _http_error(error: web.HTTPException) -> web.Response:
    """Errors of aiohttp itself (unknown route, wrong method, body too large) in our format."""
    texts = {
        404: ("not-found", "no resource at this path"),
        413: ("too-large", f"the body exceeds {MAX_BODY} bytes"),
    }
    code, message = texts.get(error.status, ("refused", error.reason))
    body = {"code": code, "message": message, "field": "", "details": {}}
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    return json_response(body, status=error.status, headers=headers)


async def read_json(request: web.Request) -> dict[str, Any]:
    """The body as a JSON object, or `Malformed`."""
    data = await request.read()
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise Malformed("the body must be a JSON object")
    return value


def server_tls(cert: Path, key: Path, *, client_ca: Path | None = None) -> ssl.SSLContext:
    """TLS of a listener; with `client_ca` clients must present a certificate that it signed (mTLS)."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # TLS 1.0 and 1.1 are deprecated (RFC 8996).
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _ClientFaults(logging.Filter):
    """Log faults of clients (invalid HTTP, disconnects) without traceback and content, which may contain secrets."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            log.debug("invalid request", kind=type(error).__name__)
            return False
        return True


# A logger of its own: aiohttp logs protocol errors with the content of the request.
_PROTOCOL_LOG = logging.getLogger("weft.http.protocol")
_PROTOCOL_LOG.addFilter(_ClientFaults())


def _runner(app: web.Application, *, grace: float) -> web.AppRunner:
    return web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=grace, logger=_PROTOCOL_LOG)


@asynccontextmanager
async def serving(
    app: web.Application, addresses: tuple[tuple[str, int], ...], *, tls: ssl.SSLContext | None, grace: float = 2.0
) -> AsyncIterator[None]:
    """Serve while the block runs; `Unavailable` names the address that cannot be bound."""
    runner = _runner(app, grace=grace)
    await runner.setup()
    try:
        for host, port in addresses:
            try:
                await web.TCPSite(runner, host, port, ssl_context=tls, reuse_address=True).start()
            except OSError as error:
                raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving_privately(app: web.Application, path: Path, *, grace: float = 2.0) -> AsyncIterator[None]:
    """Serve on a unix socket for root and our own user while the block runs; `Unavailable` if it cannot be bound."""
    runner = _runner(app, grace=grace)
    await runner.setup()
    with ExitStack() as undo:
        try:
            try:
                await web.SockSite(runner, listen_privately(path)).start()
            except OSError as error:
                raise Unavailable(f"cannot listen on {path}: {error.strerror}") from error
            # Only after a successful bind: before that the path may belong to another server.
            undo.callback(path.unlink, missing_ok=True)
            yield
        finally:
            await runner.cleanup()
