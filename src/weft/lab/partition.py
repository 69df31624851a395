"""A door between a host of the lab and its store: shut, nothing passes, as when a cable is cut."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Self

_PIECE = 65_536

# A unix socket, or host and port.
Place = Path | tuple[str, int]


class Partition:
    """Passes connections on from one place to another while the block runs, unless it is shut."""

    def __init__(self, place: Place, *, to: Place) -> None:
        self._place = place
        self._to = to
        self._open = True
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def shut(self) -> None:
        """Break all connections and let no new one through."""
        self._open = False
        await self._break_all()

    def open(self) -> None:
        """Let connections through again."""
        self._open = True

    async def __aenter__(self) -> Self:
        if isinstance(self._place, Path):
            self._server = await asyncio.start_unix_server(self._serve, self._place)
        else:
            self._server = await asyncio.start_server(self._serve, *self._place)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._break_all()
        await self._server.wait_closed()

    async def _break_all(self) -> None:
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._connections.add(this)
        try:
            if self._open:
                await self._pass_on(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either side has gone, or the door was shut
        finally:
            self._connections.discard(this)
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if isinstance(self._to, Path):
            far_reader, far_writer = await asyncio.open_unix_connection(self._to)
        else:
            far_reader, far_writer = await asyncio.open_connection(*self._to)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            far_writer.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
    raise ConnectionResetError("one side has closed")
