"""Store behind netmaster, for agents: the same port over a unix socket or TLS (`weft.runtime.store.wire`)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from weft.domain.codec import UNDECODABLE
from weft.domain.errors import Compacted, Unavailable, WeftError
from weft.domain.ids import StoreKey
from weft.ports.store import Change, Compare, Entry, LeaseId, Listing, Revision, Write
from weft.runtime.backoff import Backoff
from weft.runtime.client_tls import client_tls
from weft.runtime.http_failover import Servers, TryNextServer
from weft.runtime.store import wire
from weft.runtime.store.group_commit import check_writes

T = TypeVar("T")

_OK = 200
_TOO_MANY_REQUESTS = 429
# Four missed heartbeats: the connection is dead.
_IDLE_TIMEOUT_S = 4 * wire.HEARTBEAT

_entry = msgspec.msgpack.Decoder(Entry | None)
_listing = msgspec.msgpack.Decoder(Listing)
_revision = msgspec.msgpack.Decoder(Revision)
_lease = msgspec.msgpack.Decoder(LeaseId)
_nothing = msgspec.msgpack.Decoder(None)
_fault = msgspec.msgpack.Decoder(wire.Fault)


class RemoteStore:
    """See `ports.store`. Writes to keys that this node does not own raise `Denied`."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    async def read(self, key: StoreKey) -> Entry | None:
        return await self._call("read", wire.KeyRequest(key), _entry)

    async def list(self, prefix: StoreKey) -> Listing:
        return await self._call("list", wire.KeyRequest(prefix), _listing)

    async def commit(self, compares: Sequence[Compare], writes: Sequence[Write]) -> Revision:
        check_writes(writes)
        request = wire.CommitRequest(tuple(compares), tuple(writes))
        return await self._call("commit", request, _revision, repeatable=not writes)

    async def watch(self, prefix: StoreKey, since: Revision) -> AsyncGenerator[Change, None]:
        backoff = Backoff()
        while True:
            body = wire.encode(wire.WatchRequest(prefix, since))
            try:
                async with self._servers.stream(f"{wire.PREFIX}/watch", body, idle_timeout=_IDLE_TIMEOUT_S) as stream:
                    if stream.status != _OK:
                        raise _error(b"".join([piece async for piece in stream.pieces]))
                    async for frame in wire.frames(stream.pieces):
                        if frame.change is None:
                            raise wire.error_of(frame.fault) if frame.fault else Unavailable("empty frame")
                        since = frame.change.revision
                        yield frame.change
                        backoff.reset()
            except Compacted:
                raise
            except Unavailable:
                pass
            await backoff.pause()

    async def grant(self, ttl: float) -> LeaseId:
        # Repeatable: a second grant leaves a lease that expires by itself.
        return await self._call("grant", wire.GrantRequest(ttl), _lease)

    async def keep_alive(self, lease: LeaseId) -> None:
        await self._call("keep-alive", wire.LeaseRequest(lease), _nothing)

    async def revoke(self, lease: LeaseId) -> None:
        await self._call("revoke", wire.LeaseRequest(lease), _nothing)

    async def __aenter__(self) -> Self:
        await self._servers.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._servers.__aexit__(kind, error, trace)

    async def _call(
        self, call: str, request: msgspec.Struct, answer: msgspec.msgpack.Decoder[T], *, repeatable: bool = True
    ) -> T:
        def parse(status: int, data: bytes) -> T:
            if status == _TOO_MANY_REQUESTS:
                raise TryNextServer(_error(data).message)  # nothing was done
            if status != _OK:
                raise _error(data)
            try:
                return answer.decode(data)
            except UNDECODABLE as error:
                raise Unavailable(f"cannot decode the response to {call}: {data[:200]!r}") from error

        return await self._servers.ask(
            f"{wire.PREFIX}/{call}", wire.encode(request), parse=parse, repeatable=repeatable
        )


def _error(data: bytes) -> WeftError:
    """Decode an error response."""
    try:
        return wire.error_of(_fault.decode(data))
    except UNDECODABLE:
        return Unavailable(f"not an error response of netmaster: {data[:200]!r}")


def open_store(endpoints: Sequence[str], *, node: str, ca: str = "", cert: str = "", key: str = "") -> RemoteStore:
    """The store of the netmasters at these endpoints (`unix:PATH` or `https://HOST:PORT`), as this node may use it.

    Over TLS the client certificate authenticates the node (docs/design/node-enrollment.md). All files are read
    again when they change.
    """
    return RemoteStore(Servers(endpoints, tls=client_tls(ca=ca, cert=cert, key=key), headers={wire.NODE_HEADER: node}))
