"""Talking to netdns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from weft.domain.errors import Malformed, Unavailable
from weft.runtime.dns_control import Message, Report, decode_report, encode, read_body

# How long netdns may take to carry out a message.
REPORT_WITHIN_S = 5.0


class Conversation:
    """An open connection to netdns."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def say(self, message: Message) -> Report:
        """The report when the message is in force; `Unavailable` when it is not, for whatever reason."""
        try:
            async with asyncio.timeout(REPORT_WITHIN_S):
                self._writer.write(encode(message))
                await self._writer.drain()
                report = decode_report(await read_body(self._reader))
        except (OSError, TimeoutError, asyncio.IncompleteReadError, Malformed) as error:
            raise Unavailable(f"netdns has not answered: {error or 'not in time'}") from error
        if report.refused:
            raise Unavailable(f"netdns refuses: {report.refused}")
        return report


@asynccontextmanager
async def conversation_with(socket: Path) -> AsyncIterator[Conversation]:
    try:
        async with asyncio.timeout(REPORT_WITHIN_S):
            reader, writer = await asyncio.open_unix_connection(socket)
    except (OSError, TimeoutError) as error:
        raise Unavailable(f"netdns cannot be reached at {socket}") from error
    try:
        yield Conversation(reader, writer)
    finally:
        writer.close()


async def tell(socket: Path, message: Message) -> Report:
    """Say one thing to netdns; `Unavailable` when it is not there."""
    async with conversation_with(socket) as conversation:
        return await conversation.say(message)
