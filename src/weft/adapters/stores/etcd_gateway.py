"""Requests to etcd's JSON gateway: failover, credentials, and etcd's errors told in ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from weft.adapters.stores import etcd_wire as wire
from weft.domain.errors import Compacted, Denied, Invalid, NotFound, Unavailable, WeftError
from weft.runtime.http_failover import Servers, TryNextServer

T = TypeVar("T")

_OK = 200
# Seconds without news after which a watch is opened again, since its connection may be dead without a word.
_SILENCE = 3.0

# gRPC's status codes.
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

# With the code "unavailable" a request may or may not have been proposed to the cluster; with these texts it surely was
# not. They are part of etcd's API: its own clients tell errors by them.
_NOT_PROPOSED = frozenset({"etcdserver: no leader", "etcdserver: too many requests", "etcdserver: not capable"})

# What gRPC says with the code "resource exhausted" of a request that no member will ever read.
_TOO_LARGE = "message larger than max"

# Has a member that is cut off from its cluster refuse, rather than keep us waiting for news it cannot have.
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
        self._authenticating = asyncio.Lock()

    async def call(self, path: str, request: wire.Request, answer: msgspec.json.Decoder[T], *, repeatable: bool) -> T:
        """Send a request and decode the answer; see `Servers.post` for `repeatable`."""
        body = wire.encode(request)
        headers = self._headers or await self._authenticate(None)
        try:
            return await self._post(path, body, answer, repeatable=repeatable, headers=headers)
        except (Denied, Invalid) as error:
            if not self._token_at_fault(error):
                raise
        # Refused, so nothing has happened, and it can be asked again.
        headers = await self._authenticate(headers)
        return await self._post(path, body, answer, repeatable=repeatable, headers=headers)

    async def watch(self, request: wire.Watch) -> AsyncGenerator[wire.Watched, None]:
        """The answers of one watch. Ends with an error only: `Unavailable` when it is to be opened again."""
        headers = self._headers or await self._authenticate(None)
        body = wire.encode(request)
        async with self._servers.stream("/v3/watch", body, silence=_SILENCE, headers=headers) as stream:
            try:
                async for line in _lines(stream.pieces):
                    if stream.status != _OK:
                        raise _translated(_error.decode(line), elsewhere=True)
                    answer = _watched.decode(line)
                    if answer.error is not None:
                        raise _translated(answer.error, elsewhere=True)
                    if answer.result is not None:
                        yield answer.result
            except (Denied, Invalid) as error:
                if not self._token_at_fault(error):
                    raise
                await self._authenticate(headers)
        raise Unavailable("etcd ended the watch")

    async def renew_token(self) -> None:
        """Authenticate anew, where there are credentials."""
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
        def judge(status: int, data: bytes) -> T:
            try:
                if status == _OK:
                    return answer.decode(data)
                error = _error.decode(data)
            except msgspec.MsgspecError as unreadable:
                raise Unavailable(f"etcd's answer to {path} is not readable: {data[:200]!r}") from unreadable
            raise _translated(error, elsewhere=repeatable or error.message in _NOT_PROPOSED)

        return await self._servers.ask(path, body, judge=judge, repeatable=repeatable, headers=headers)

    def _token_at_fault(self, error: WeftError) -> bool:
        """Whether a new token may help. etcd says "invalid argument" where a token is missing, or too old for it."""
        return self._credentials is not None and error.details["code"] in {_UNAUTHENTICATED, _INVALID_ARGUMENT}

    async def _authenticate(self, refused: Mapping[str, str] | None) -> Mapping[str, str]:
        """Headers with a token other than the refused one."""
        assert self._credentials is not None
        async with self._authenticating:
            if self._headers is not None and self._headers is not refused:
                return self._headers  # another request has got a new one meanwhile
            request = wire.Authenticate(name=self._credentials.user, password=self._credentials.password)
            try:
                answer = await self._post(
                    "/v3/auth/authenticate", wire.encode(request), _token, repeatable=True, headers=_REQUIRE_LEADER
                )
            except Invalid as error:
                raise Denied(f"etcd refuses user {self._credentials.user!r}: {error.message}") from error
            except Denied as error:
                if error.details["code"] != _FAILED_PRECONDITION:
                    raise
                answer = wire.Token()  # etcd asks nobody for a password
            token = {"Authorization": answer.token} if answer.token else {}
            self._headers = {**_REQUIRE_LEADER, **token}
            return self._headers


def _translated(error: wire.Error, *, elsewhere: bool) -> WeftError | TryNextServer:
    """The refusal in our words; one that concerns this member alone is taken `elsewhere`, where that does no harm."""
    code = error.code or error.grpc_code
    if code == _RESOURCE_EXHAUSTED and _TOO_LARGE in error.message:
        return Invalid(f"etcd: {error.message}", details={"code": code})
    if elsewhere and code not in _ERRORS:
        return TryNextServer(error.message)
    return _ERRORS.get(code, Unavailable)(f"etcd: {error.message}", details={"code": code})


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The lines of a stream, the unfinished last one too; a line may be many megabytes long."""
    unfinished = bytearray()
    async for piece in pieces:
        *ended, rest = piece.split(b"\n")
        for end in ended:
            line = bytes(unfinished) + end
            unfinished.clear()
            if line:
                yield line
        unfinished += rest
    if unfinished:
        yield bytes(unfinished)
