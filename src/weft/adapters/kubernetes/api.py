"""HTTP client of the Kubernetes API: several servers with failover, and credentials that are reloaded as they rotate.

The protocol is that of "Kubernetes API Concepts": JSON lists in pages, watches as lines of JSON, `Status` as the body
of an error.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from weft.adapters.kubernetes.credentials import ClientConfig
from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Compacted, Conflict, Denied, Invalid, NotFound, Unavailable, WeftError
from weft.runtime.client_tls import ClientTls
from weft.runtime.http_failover import Servers, TryNextServer, is_exposed, is_plain

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"

# Timeout of one request: long enough for a page of a large list from a busy server.
_RESPONSE_TIMEOUT_S = 10.0
# Longest line of a watch. Larger than any object (etcd takes 1.5 MB); a stream without line ends must not fill memory.
_MAX_LINE = 8 << 20

_UNAUTHORIZED, _GONE = 401, 410
# The message for a resource version that the server has not reached, after its etcd was restored from a backup. The
# status is 504 then, so only the text distinguishes it from a timeout.
_FUTURE_RESOURCE_VERSION = "Too large resource version"
# Errors by HTTP status; any other status is `Unavailable`.
_ERRORS: Mapping[int, type[WeftError]] = {
    400: Invalid,
    _UNAUTHORIZED: Denied,
    403: Denied,
    404: NotFound,
    409: Conflict,
    _GONE: Compacted,
    422: Invalid,
}


class Status(msgspec.Struct, frozen=True):
    """A v1 Status: the body of an error, and the object of an ERROR event."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Api:
    """Requests to the API server. An async context manager. Each call ends in bounded time, with a `WeftError`."""

    def __init__(self, config: ClientConfig) -> None:
        if config.token and (exposed := [url for url in config.servers if is_exposed(url)]):
            raise Invalid(
                f"the token would be sent in clear text to {exposed[0]}: give an https:// URL of the API server",
                field="servers",
            )
        self._config = config
        if config.cert and (plain := [url for url in config.servers if is_plain(url)]):
            raise Invalid(
                f"{plain[0]} has no TLS, so that the client certificate would not be used: "
                "give an https:// URL of the API server, or remove the certificate",
                field="servers",
            )
        files = (file for file in (config.ca, config.cert, config.key) if isinstance(file, Path))
        has_tls = any(url.lower().startswith("https:") for url in config.servers)
        tls = ClientTls(lambda: _tls(config), *files) if has_tls else None
        self._servers = Servers(config.servers, tls=tls, headers={"Accept": JSON, "Accept-Encoding": "identity"})

    async def get(self, path: str) -> bytes:
        """Read a path; `NotFound`, `Denied` or `Unavailable`."""
        return await self._request("GET", path, repeatable=True)

    async def post(self, path: str, body: bytes) -> bytes:
        """Create an object; `Conflict` when it exists. Never sent twice, as a POST is not idempotent."""
        return await self._request("POST", path, body, content=JSON, repeatable=False)

    async def merge_patch(self, path: str, body: bytes) -> bytes:
        """Change members of an object (RFC 7386)."""
        return await self._request("PATCH", path, body, content=MERGE_PATCH, repeatable=True)

    async def stream_lines(self, path: str, *, read_timeout: float) -> AsyncGenerator[bytes, None]:
        """The lines of a streamed response until the server ends it; `Unavailable` when the connection breaks."""
        async with self._servers.stream(
            path, method="GET", idle_timeout=read_timeout, headers=self._headers()
        ) as stream:
            rest = b""
            async for chunk in stream.pieces:
                *lines, rest = (rest + chunk).split(b"\n")
                if stream.status == 200:
                    for line in lines:
                        if line:
                            yield line
                if len(rest) > _MAX_LINE:
                    raise Unavailable(f"{path}: a line exceeds {_MAX_LINE} bytes")
            if stream.status != 200:
                error = error_from_status(stream.status, rest)
                raise TryNextServer(error.message) if type(error) is Unavailable else error

    async def _request(
        self, method: str, path: str, body: bytes = b"", *, repeatable: bool, content: str = ""
    ) -> bytes:
        # Two attempts: the kubelet may have rotated the token between reading it and the server's check.
        for is_last in (False, True):
            headers = {**self._headers(), **({"Content-Type": content} if content else {})}
            try:
                return await self._servers.ask(
                    path,
                    body,
                    method=method,
                    parse=_check_status,
                    repeatable=repeatable,
                    headers=headers,
                    response_timeout=_RESPONSE_TIMEOUT_S,
                )
            except _Unauthorized as error:
                if is_last or headers.get("Authorization") == self._headers().get("Authorization"):
                    raise Denied(error.message) from error
        raise AssertionError("unreachable")

    def _headers(self) -> dict[str, str]:
        """Read for each request: service account tokens live for an hour."""
        token = self._config.token
        if isinstance(token, Path):
            try:
                token = token.read_text().strip()
            except OSError as error:
                raise Unavailable(f"the token {token} cannot be read: {error.strerror}") from error
        return {"Authorization": f"Bearer {token}"} if token else {}

    async def __aenter__(self) -> Self:
        await self._servers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._servers.__aexit__(kind, error, trace)


class ApiClient:
    """Base of classes that use the API server; connected while the context manager is entered."""

    def __init__(self, config: ClientConfig) -> None:
        self._api = Api(config)

    async def __aenter__(self) -> Self:
        await self._api.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.__aexit__(kind, error, trace)


class _Unauthorized(Denied):
    """401: the server rejects the current token."""


def _check_status(status: int, body: bytes) -> bytes:
    if status < 300:
        return body
    if status >= 500 or status == 429:
        raise TryNextServer(error_from_status(status, body).message)
    if status == _UNAUTHORIZED:
        raise _Unauthorized(error_from_status(status, body).message)
    raise error_from_status(status, body)


def error_from_status(code: int, body: bytes) -> WeftError:
    """The `WeftError` for an HTTP status with its `Status` body."""
    try:
        status = msgspec.json.decode(body, type=Status)
    except UNDECODABLE:
        # Proxies and load balancers answer with text of their own.
        status = Status(message=body[:200].decode(errors="replace"))
    kind = Compacted if _FUTURE_RESOURCE_VERSION in status.message else _ERRORS.get(code, Unavailable)
    return kind(f"the API server answers {code}: {status.message[:500]}")


def _tls(config: ClientConfig) -> ssl.SSLContext:
    context = _load_ca(config.ca)
    _load_client_cert(context, config)
    return context


def _load_ca(ca: Path | bytes | None) -> ssl.SSLContext:
    try:
        if isinstance(ca, bytes):
            return ssl.create_default_context(cadata=ca.decode("ascii"))
        return ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError, UnicodeDecodeError) as error:
        raise Invalid(f"the API server's CA {_name(ca)} is not usable: {error}") from error


def _load_client_cert(context: ssl.SSLContext, config: ClientConfig) -> None:
    """Present the current client certificate on new connections."""
    if config.cert is None:
        return
    try:
        with _as_file(config.cert) as cert, _as_file(config.key) as key:
            assert cert is not None
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"the client certificate {_name(config.cert)} is not usable: {error}") from error


@contextmanager
def _as_file(material: Path | bytes | None) -> Iterator[str | None]:
    """A path for the material. `load_cert_chain` takes files only, so bytes go to an unlinked temporary file."""
    if isinstance(material, bytes):
        with tempfile.TemporaryFile() as file:
            file.write(material)
            file.flush()
            # The file has no name of its own, so that a private key never appears in a directory.
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        yield None if material is None else str(material)


def _name(material: Path | bytes | None) -> str:
    return str(material) if isinstance(material, Path) else "(inline)"
