"""Client of etcd's JSON gateway: failover, authentication, and translation of etcd's errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from weft.adapters.stores import etcd_wire as wire
from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Compacted, Denied, Invalid, NotFound, Unavailable, WeftError
from weft.runtime.http_failover import Servers, TryNextServer

T = TypeVar("T")

_OK = 200
# Idle seconds after which a watch is reopened: a dead peer may leave the TCP connection half-open.
_IDLE_TIMEOUT_S = 3.0

# gRPC status codes (google.golang.org/grpc/codes).
_INVALID_ARGUMENT = 3
_RESOURCE_EXHAUSTED = 8
_FAILED_PRECONDITION = 9
_UNAUTHENTICATED = 16
_ERRORS: Mapping[int, type[WeftError]] = {
    _INVALID_ARGUMENT: Invalid,
    5: NotFound,
    7: Denied,
    _FAILED_PRECONDITION: Denied,
    11: Compacted,
    _UNAUTHENTICATED: Denied,
}

# With the code UNAVAILABLE a request may or may not have been proposed to Raft; with these messages it certainly was
# not. The messages are part of etcd's API: its own clients match them.
_NOT_PROPOSED = frozenset({"etcdserver: no leader", "etcdserver: too many requests", "etcdserver: not capable"})

# gRPC's message with RESOURCE_EXHAUSTED for a request that no member accepts: retrying is useless.
_TOO_LARGE = "message larger than max"

# A member without a leader then rejects requests, instead of serving a watch that never gets events.
_REQUIRE_LEADER = {"Grpc-Metadata-hasleader": "true"}

_error = msgspec.json.Decoder(wire.Error)
_token = msgspec.json.Decoder(wire.Token)
_watched = msgspec.json.Decoder(wire.WatchAnswer, strict=False)


class Credentials(msgspec.Struct, frozen=True):
    """A user of etcd."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r})"


class Gateway:
    """The gateway of a cluster. Opened and closed as an async context manager."""

    def __init__(self, servers: Servers, credentials: Credentials | None) -> None:
        self._servers = servers
        self._credentials = credentials
        self._headers: Mapping[str, str] | None = None if credentials else _REQUIRE_LEADER
        # One login for all requests that find the token expired.
        self._authenticating = asyncio.Lock()

    async def call(self, path: str, request: wire.Request, answer: msgspec.json.Decoder[T], *, repeatable: bool) -> T:
        """Send a request and decode the response; see `Servers.ask` for `repeatable`."""
        body = wire.encode(request)
        headers = self._headers or await self._authenticate(None)
        try:
            return await self._post(path, body, answer, repeatable=repeatable, headers=headers)
        except (Denied, Invalid) as error:
            if not self._may_need_token(error):
                raise
        # Rejected before execution, so it can be sent again with a new token.
        headers = await self._authenticate(headers)
        return await self._post(path, body, answer, repeatable=repeatable, headers=headers)

    async def watch(self, request: wire.Watch) -> AsyncGenerator[wire.Watched, None]:
        """The responses of one watch. It ends only with an error: `Unavailable` if it should be reopened."""
        headers = self._headers or await self._authenticate(None)
        body = wire.encode(request)
        async with self._servers.stream("/v3/watch", body, idle_timeout=_IDLE_TIMEOUT_S, headers=headers) as stream:
            try:
                async for line in _lines(stream.pieces):
                    # The gateway reports some errors by status, others in the stream.
                    try:
                        failed = None if stream.status == _OK else _error.decode(line)
                        answer = wire.WatchAnswer(error=failed) if failed else _watched.decode(line)
                    except UNDECODABLE as unreadable:
                        raise _unreadable("/v3/watch", line) from unreadable
                    if answer.error is not None:
                        raise _translate(answer.error, may_retry=True)
                    if answer.result is not None:
                        yield answer.result
            except (Denied, Invalid) as error:
                if not self._may_need_token(error):
                    raise
                await self._authenticate(headers)
        raise Unavailable("etcd ended the watch")

    async def renew_token(self) -> None:
        """Authenticate again, if there are credentials."""
        if self._credentials is not None:
            await self._authenticate(self._headers)

    async def __aenter__(self) -> Self:
        await self._servers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._servers.__aexit__(kind, error, trace)

    async def _post(
        self, path: str, body: bytes, answer: msgspec.json.Decoder[T], *, repeatable: bool, headers: Mapping[str, str]
    ) -> T:
        def parse(status: int, data: bytes) -> T:
            try:
                if status == _OK:
                    return answer.decode(data)
                error = _error.decode(data)
            except UNDECODABLE as unreadable:
                raise _unreadable(path, data) from unreadable
            raise _translate(error, may_retry=repeatable or error.message in _NOT_PROPOSED)

        return await self._servers.ask(path, body, parse=parse, repeatable=repeatable, headers=headers)

    def _may_need_token(self, error: WeftError) -> bool:
        """Whether a new token may help. etcd returns INVALID_ARGUMENT for a missing or expired token."""
        return self._credentials is not None and error.details["code"] in {_UNAUTHENTICATED, _INVALID_ARGUMENT}

    async def _authenticate(self, rejected: Mapping[str, str] | None) -> Mapping[str, str]:
        """Headers with another token than the rejected one."""
        assert self._credentials is not None
        async with self._authenticating:
            if self._headers is not None and self._headers is not rejected:
                return self._headers  # a concurrent request has already fetched a new token
            request = wire.Authenticate(name=self._credentials.user, password=self._credentials.password)
            try:
                answer = await self._post(
                    "/v3/auth/authenticate", wire.encode(request), _token, repeatable=True, headers=_REQUIRE_LEADER
                )
            except Invalid as error:
                raise Denied(f"etcd rejects user {self._credentials.user!r}: {error.message}") from error
            except Denied as error:
                if error.details["code"] != _FAILED_PRECONDITION:
                    raise
                answer = wire.Token()  # authentication is disabled in etcd
            token = {"Authorization": answer.token} if answer.token else {}
            self._headers = {**_REQUIRE_LEADER, **token}
            return self._headers


def _unreadable(path: str, data: bytes) -> Unavailable:
    return Unavailable(f"cannot decode etcd's response to {path}: {data[:200]!r}")


def _translate(error: wire.Error, *, may_retry: bool) -> WeftError | TryNextServer:
    """Translate an error; one of this member alone becomes `TryNextServer` if a retry is safe (`may_retry`)."""
    code = error.code or error.grpc_code
    if code == _RESOURCE_EXHAUSTED and _TOO_LARGE in error.message:
        return Invalid(f"etcd: {error.message}", details={"code": code})
    if may_retry and code not in _ERRORS:
        return TryNextServer(error.message)
    return _ERRORS.get(code, Unavailable)(f"etcd: {error.message}", details={"code": code})


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, including an unfinished last one. A line may have many megabytes."""
    unfinished = bytearray()
    async for piece in pieces:
        # A line may end in any later piece.
        *ended, rest = piece.split(b"\n")
        for end in ended:
            line = bytes(unfinished) + end
            unfinished.clear()
            if line:
                yield line
        unfinished += rest
    if unfinished:
        yield bytes(unfinished)
