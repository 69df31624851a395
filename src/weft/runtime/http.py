"""A small JSON server on aiohttp: errors as `{code, message, field, details}`, listeners with and without TLS."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from weft.domain.errors import (
    Behind,
    Compacted,
    Conflict,
    Denied,
    Invalid,
    Limited,
    Malformed,
    Mismatch,
    NotFound,
    Unavailable,
    WeftError,
)
from weft.runtime.admission import Guard, Limits
from weft.runtime.listener import Tls, accepting, bind_tcp
from weft.runtime.logs import Log
from weft.runtime.unix import listen_privately

log = Log("http")

# Ample for any object; backups have a limit of their own.
MAX_BODY = 1 << 20
JSON_TYPE = "application/json"
# Seconds after which a connection without requests is closed; longer than clients keep one.
IDLE_S = 75.0
# For a server without a guard: it limits nothing, but it counts connections that are about to be closed.
_UNLIMITED = Limits(connections=1 << 30, per_source=1 << 30, per_local=1 << 30)

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
    (Limited, 429),
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
        response.headers["Retry-After"] = str(error.details.get("retryAfter", 1))
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
    return web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        shutdown_timeout=grace,
        logger=_PROTOCOL_LOG,
        keepalive_timeout=IDLE_S,
    )


@asynccontextmanager
async def serving(
    app: web.Application,
    addresses: tuple[tuple[str, int], ...],
    *,
    tls: Tls,
    guard: Guard | None = None,
    unix: Path | None = None,
    grace: float = 2.0,
) -> AsyncIterator[None]:
    """Serve while the block runs, on addresses and on a unix socket for root and our own user.

    `Unavailable` names the address that cannot be bound. The middleware of `guard` must be one of the application's.
    """
    runner = _runner(app, grace=grace)
    await runner.setup()
    guard = guard or Guard("http", _UNLIMITED)
    async with AsyncExitStack() as undo:
        undo.push_async_callback(runner.cleanup)
        protocol = cast("Callable[[], asyncio.Protocol]", runner.server)
        if unix is not None:
            try:
                private = listen_privately(unix)
            except OSError as error:
                raise Unavailable(f"cannot listen on {unix}: {error.strerror}") from error
            # Only after a successful bind: before that the path may belong to another server. A socket file without a
            # server would look like a refused connection instead of a missing one.
            undo.callback(unix.unlink, missing_ok=True)
            await undo.enter_async_context(accepting([private], protocol, tls=None, guard=guard))
        for host, port in addresses:
            try:
                listeners = bind_tcp(host, port)
            except OSError as error:
                raise Unavailable(f"cannot listen on {host}:{port}: {error.strerror}") from error
            await undo.enter_async_context(accepting(listeners, protocol, tls=tls, guard=guard))
        yield
