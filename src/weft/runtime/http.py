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

MAX_BODY = 1 << 20
JSON_TYPE = "application/json"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# The first class an error belongs to decides its status.
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
    """An error as callers see it; never a trace."""
    body = {"code": error.code, "message": error.message, "field": error.field, "details": dict(error.details)}
    response = json_response(body, status=status or status_of(error))
    if isinstance(error, Unavailable):
        response.headers["Retry-After"] = "1"
    return response


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong becomes a JSON body with the right status."""
    try:
        return await handler(request)
    except WeftError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _http_error(error)
    except web.RequestPayloadError:
        return error_response(Malformed("the body is not as its headers say"))
    except TimeoutError:
        return error_response(Unavailable("the request took too long: try again"))
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:  # the outermost loop of a request: told in the log, not to the caller
        log.failure("request failed", method=request.method, path=request.path)
        return error_response(WeftError("internal error: see the log"), status=500)


@web.middleware
async def own_pages_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse what a browser sends for a page of somebody else: whoever opens it may be let in where the page is not."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        raise Denied(f"a page of {origin[:100]!r} may not ask here", field="Origin")
    return await handler(request)


def _http_error(error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (unknown route, wrong method, body too large) in our form."""
    words = {
        404: ("not-found", "there is nothing at this path"),
        413: ("too-large", f"the body exceeds {MAX_BODY} bytes"),
    }
    code, message = words.get(error.status, ("refused", error.reason))
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
    """TLS for a listener; with `client_ca` callers must show a certificate it signed."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(cert, key)
    if client_ca:
        context.load_verify_locations(client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _CallersFaults(logging.Filter):
    """Keeps faults of callers (no valid HTTP, gone away) from filling the log with traces, and their words, which may
    be secrets, out of it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError):
            log.debug("request broken", kind=type(error).__name__)
            return False
        return True


_PROTOCOL_LOG = logging.getLogger("weft.http.protocol")
_PROTOCOL_LOG.addFilter(_CallersFaults())


def _runner(app: web.Application, *, grace: float) -> web.AppRunner:
    return web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=grace, logger=_PROTOCOL_LOG)


@asynccontextmanager
async def serving(
    app: web.Application, addresses: tuple[tuple[str, int], ...], *, tls: ssl.SSLContext | None, grace: float = 2.0
) -> AsyncIterator[None]:
    """Serve while the block runs; `Unavailable` names the address that cannot be had."""
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
    """Serve on a unix socket for root and our own user while the block runs; `Unavailable` when it cannot be had."""
    runner = _runner(app, grace=grace)
    await runner.setup()
    with ExitStack() as undo:
        try:
            try:
                await web.SockSite(runner, listen_privately(path)).start()
            except OSError as error:
                raise Unavailable(f"cannot listen on {path}: {error.strerror}") from error
            undo.callback(path.unlink, missing_ok=True)
            yield
        finally:
            await runner.cleanup()
