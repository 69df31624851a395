"""Workloads that answer for a service: each tells its name and whom it saw, so that a caller knows where it got to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from weft.lab.traffic import ONE_TRY_S, QUIET_S, TCP, Place, Transport
from weft.lab.waiting import DEADLINE
from weft.runtime.tasks import background


class Answer(NamedTuple):
    """Who has answered, and as whom it saw the caller."""

    who: str
    saw: str


@asynccontextmanager
async def answering(places: Mapping[str, Place], *, port: int, transport: Transport = TCP) -> AsyncIterator[None]:
    """Everyone at these places answers while the block runs."""
    async with AsyncExitStack() as stack:
        for name, place in places.items():
            ear = stack.enter_context(place.listening(port, transport))
            work = _accept(name, ear) if transport is TCP else _echo(name, ear)
            await stack.enter_async_context(background(work, name=f"{name} answers"))
        yield


async def _accept(name: str, ear: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, (host, *_) = await loop.sock_accept(ear)
        with connection:
            await loop.sock_sendall(connection, f"{name} {host}".encode())


async def _echo(name: str, ear: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        _, source = await loop.sock_recvfrom(ear, 64)
        await loop.sock_sendto(ear, f"{name} {source[0]}".encode(), source)


async def ask(source: Place, address: object, port: int, *, transport: Transport = TCP) -> Answer:
    """What is answered at an address; `ConnectionRefusedError` when nobody is there."""
    with source.open_caller(transport) as caller:
        return await ask_by(caller, address, port, transport=transport)


async def ask_by(caller: socket.socket, address: object, port: int, *, transport: Transport = TCP) -> Answer:
    """The same by a socket of one's own. What is lost on the way is said again, as every client does."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(DEADLINE):
        await loop.sock_connect(caller, (str(address), port))
        while True:
            if transport is not TCP:
                await loop.sock_sendall(caller, b"?")
            try:
                async with asyncio.timeout(None if transport is TCP else ONE_TRY_S):
                    who, saw = (await loop.sock_recv(caller, 256)).decode().split()
                    return Answer(who, saw)
            except TimeoutError:
                continue


async def is_refused(source: Place, address: object, port: int, *, transport: Transport = TCP) -> bool:
    """Whether a caller is told at once that nobody is there."""
    try:
        await ask(source, address, port, transport=transport)
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    return False


async def is_ignored(source: Place, address: object, port: int, *, transport: Transport = TCP) -> bool:
    """Whether a caller hears nothing at all, or that there is no way."""
    try:
        async with asyncio.timeout(QUIET_S):
            await ask(source, address, port, transport=transport)
    except TimeoutError:
        return True
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError | ConnectionResetError)
    return False
