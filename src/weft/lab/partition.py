"""A proxy between a host of the lab and its store that simulates a network partition."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

_CHUNK = 65_536

# A unix socket, or host and port.
StreamAddress = Path | tuple[str, int]


class PartitionProxy:
    """Listens on one address and forwards connections to another inside the block, unless blocked."""

    def __init__(self, listen: StreamAddress, *, to: StreamAddress) -> None:
        self._listen = listen
        self._to = to
        self._blocked = False
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def block(self) -> None:
        """Abort all connections and reject new ones."""
        self._blocked = True
        await self._abort_all()

    def unblock(self) -> None:
        """Forward connections again."""
        self._blocked = False

    async def __aenter__(self) -> Self:
        if isinstance(self._listen, Path):
            self._server = await asyncio.start_unix_server(self._serve, self._listen)
        else:
            self._server = await asyncio.start_server(self._serve, *self._listen)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        # Before wait_closed(): from Python 3.12 on it waits for all connections to end.
        await self._abort_all()
        await self._server.wait_closed()

    async def _abort_all(self) -> None:
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._connections.add(this)
        try:
            if not self._blocked:
                await self._forward(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one side has closed, or the proxy was blocked
        finally:
            self._connections.discard(this)
            # Not close(): that would flush data of before the partition.
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._to, Path):
            upstream_reader, upstream_writer = await asyncio.open_unix_connection(self._to)
        else:
            upstream_reader, upstream_writer = await asyncio.open_connection(*self._to)
        try:
            await asyncio.gather(_pump(reader, upstream_writer), _pump(upstream_reader, writer))
        finally:
            upstream_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("one side has closed")
