"""A TCP proxy on loopback whose connections can be cut or stalled at will."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

_PIECE = 65_536


class Proxy:
    """Forwards connections to one port of 127.0.0.1 while the block runs."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    async def cut(self) -> None:
        """Close all connections; new ones are accepted."""
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def stall(self) -> None:
        """Stop forwarding in both directions without closing connections; new ones stall too."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, including buffered data."""
        self._flowing.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._connections.add(this)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
            try:
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
            finally:
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # either side has closed, or the connection was cut
        finally:
            self._connections.discard(this)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_PIECE):
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("one side has closed")
