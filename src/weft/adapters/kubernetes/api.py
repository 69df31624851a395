"""Requests to the Kubernetes API: one of several servers, with credentials that are read anew as they rotate.

The protocol is the one of "Kubernetes API Concepts": JSON lists in pages, watches as lines of JSON, `Status` as the
body of a refusal.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from weft.adapters.kubernetes.credentials import Access
from weft.domain.errors import Compacted, Conflict, Denied, Invalid, NotFound, Unavailable, WeftError
from weft.runtime.file_change import Rewritten
from weft.runtime.http_failover import Servers, TryNextServer

T = TypeVar("T")

JSON = "application/json"
MERGE_PATCH = "application/merge-patch+json"

# How long one answer may take: a page of a large list from a busy server.
_ANSWERING_S = 10.0
# More than an object can have (etcd takes 1.5 MB); a stream without line ends must not fill the memory.
_LONGEST_LINE = 8 << 20

_UNAUTHORIZED, _GONE = 401, 410
# What is said of versions that a server has not reached which was set back to an older copy of its data.
_FROM_THE_FUTURE = "Too large resource version"
# What a refusal means; any other is `Unavailable`.
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
    """The body of a refusal, and the object of an event that is an error."""

    code: int = 0
    reason: str = ""
    message: str = ""


class Api:
    """Opened and closed as an async context manager. Every call ends in bounded time, with one of our errors."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._tls = _tls(access) if any(url.startswith("https:") for url in access.servers) else None
        self._renewed = Rewritten(*(file for file in (access.ca, access.cert, access.key) if isinstance(file, Path)))
        self._servers = Servers(access.servers, tls=self._tls, headers={"Accept": JSON, "Accept-Encoding": "identity"})

    async def get(self, path: str) -> bytes:
        """What is at a path; `NotFound`, `Denied` or `Unavailable`."""
        return await self._ask("GET", path, repeatable=True)

    async def post(self, path: str, body: bytes) -> bytes:
        """Create something; `Conflict` when it is there already. It is never sent twice."""
        return await self._ask("POST", path, body, content=JSON, repeatable=False)

    async def merge(self, path: str, body: bytes) -> bytes:
        """Change members of something."""
        return await self._ask("PATCH", path, body, content=MERGE_PATCH, repeatable=True)

    async def lines(self, path: str, *, silence: float) -> AsyncGenerator[bytes, None]:
        """The lines of an answer that goes on, until the server ends it. `Unavailable` when it breaks off."""
        async with self._servers.stream(path, method="GET", silence=silence, headers=self._headers()) as stream:
            rest = b""
            async for piece in stream.pieces:
                *whole, rest = (rest + piece).split(b"\n")
                if stream.status == 200:
                    for line in whole:
                        if line:
                            yield line
                if len(rest) > _LONGEST_LINE:
                    raise Unavailable(f"{path}: a line of more than {_LONGEST_LINE} bytes")
            if stream.status != 200:
                refused = refusal(stream.status, rest)
                raise TryNextServer(refused.message) if type(refused) is Unavailable else refused

    async def _ask(self, method: str, path: str, body: bytes = b"", *, repeatable: bool, content: str = "") -> bytes:
        for is_last in (False, True):
            headers = {**self._headers(), **({"Content-Type": content} if content else {})}
            try:
                return await self._servers.ask(
                    path,
                    body,
                    method=method,
                    judge=_judge,
                    repeatable=repeatable,
                    headers=headers,
                    answering=_ANSWERING_S,
                )
            except _Unauthorized as error:
                if is_last or headers.get("Authorization") == self._headers().get("Authorization"):
                    raise Denied(error.message) from error
        raise AssertionError("unreachable")

    def _headers(self) -> dict[str, str]:
        """Read anew for each request: tokens of service accounts live for an hour; certificates and CAs are renewed."""
        if self._renewed() and self._tls is not None:
            _renew(self._tls, self._access)
        token = self._access.token
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
    """Whoever needs the API server while it is entered, and only then."""

    def __init__(self, access: Access) -> None:
        self._api = Api(access)

    async def __aenter__(self) -> Self:
        await self._api.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._api.__aexit__(kind, error, trace)


class _Unauthorized(Denied):
    """The server does not know us, by the token of the moment."""


def _judge(status: int, body: bytes) -> bytes:
    if status < 300:
        return body
    if status >= 500 or status == 429:
        raise TryNextServer(refusal(status, body).message)
    if status == _UNAUTHORIZED:
        raise _Unauthorized(refusal(status, body).message)
    raise refusal(status, body)


def refusal(status: int, body: bytes) -> WeftError:
    """The error that a refusal means."""
    try:
        told = msgspec.json.decode(body, type=Status)
    except msgspec.MsgspecError:
        told = Status(message=body[:200].decode(errors="replace"))
    kind = Compacted if _FROM_THE_FUTURE in told.message else _ERRORS.get(status, Unavailable)
    return kind(f"the API server says {status}: {told.message[:500]}")


def _tls(access: Access) -> ssl.SSLContext:
    context = _trusting(ssl.create_default_context, access.ca)
    _show(context, access)
    return context


def _renew(context: ssl.SSLContext, access: Access) -> None:
    """Have new connections go by the files as they are now. Whom they believed before they go on to believe."""
    if isinstance(access.ca, Path):
        _trusting(context.load_verify_locations, access.ca)
    _show(context, access)


def _trusting(load: Callable[..., T], ca: Path | bytes | None) -> T:
    """What `load` makes of the CA as it is now."""
    try:
        return load(cadata=ca.decode("ascii")) if isinstance(ca, bytes) else load(cafile=ca)
    except (OSError, ssl.SSLError, UnicodeDecodeError) as error:
        raise Invalid(f"the API server's CA {_name(ca)} is not usable: {error}") from error


def _show(context: ssl.SSLContext, access: Access) -> None:
    """Have new connections show the client certificate as it is now."""
    if access.cert is None:
        return
    try:
        with _as_file(access.cert) as cert, _as_file(access.key) as key:
            assert cert is not None
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"the client certificate {_name(access.cert)} is not usable: {error}") from error


@contextmanager
def _as_file(material: Path | bytes | None) -> Iterator[str | None]:
    """The standard library reads certificates from files only: what is no file becomes one that has no name."""
    if isinstance(material, bytes):
        with tempfile.TemporaryFile() as file:
            file.write(material)
            file.flush()
            yield f"/proc/{os.getpid()}/fd/{file.fileno()}"
    else:
        yield None if material is None else str(material)


def _name(material: Path | bytes | None) -> str:
    return str(material) if isinstance(material, Path) else "given"
