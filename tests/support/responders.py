"""Service backends that answer with their own name and the source address that they observed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from weft.lab.traffic import ONE_TRY_S, QUIET_S, TCP, NetnsAddress, Transport
from weft.lab.waiting import DEADLINE
from weft.runtime.tasks import background


class Response(NamedTuple):
    """The name of the backend, and the source address that it observed."""

    responder: str
    observed_source: str


@asynccontextmanager
async def answering(
    addresses: Mapping[str, NetnsAddress], *, port: int, transport: Transport = TCP
) -> AsyncIterator[None]:
    """Run a backend at each of these addresses while the block runs."""
    async with AsyncExitStack() as stack:
        for name, address in addresses.items():
            listener = stack.enter_context(address.listening(port, transport))
            work = _accept(name, listener) if transport is TCP else _echo(name, listener)
            await stack.enter_async_context(background(work, name=f"{name} answers"))
        yield


async def _accept(name: str, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        connection, (host, *_) = await loop.sock_accept(listener)
        with connection:
            await loop.sock_sendall(connection, f"{name} {host}".encode())


async def _echo(name: str, listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    while True:
        _, source = await loop.sock_recvfrom(listener, 64)
        await loop.sock_sendto(listener, f"{name} {source[0]}".encode(), source)


async def query(source: NetnsAddress, address: object, port: int, *, transport: Transport = TCP) -> Response:
    """The response at an address; `ConnectionRefusedError` if no backend is there."""
    with source.open_client(transport) as client:
        return await query_with_socket(client, address, port, transport=transport)


async def query_with_socket(
    client: socket.socket, address: object, port: int, *, transport: Transport = TCP
) -> Response:
    """The same with an open socket. Lost datagrams are retransmitted, as every client does."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(DEADLINE):
        await loop.sock_connect(client, (str(address), port))
        while True:
            if transport is not TCP:
                await loop.sock_sendall(client, b"?")
            try:
                async with asyncio.timeout(None if transport is TCP else ONE_TRY_S):
                    responder, observed_source = (await loop.sock_recv(client, 256)).decode().split()
                    return Response(responder, observed_source)
            except TimeoutError:
                continue


async def is_refused(source: NetnsAddress, address: object, port: int, *, transport: Transport = TCP) -> bool:
    """Whether a connection is refused or reset at once."""
    try:
        await query(source, address, port, transport=transport)
    except (ConnectionRefusedError, ConnectionResetError):
        return True
    return False


async def gets_no_reply(source: NetnsAddress, address: object, port: int, *, transport: Transport = TCP) -> bool:
    """Whether a request times out or the destination is unreachable."""
    try:
        async with asyncio.timeout(QUIET_S):
            await query(source, address, port, transport=transport)
    except TimeoutError:
        return True
    except OSError as error:
        return not isinstance(error, ConnectionRefusedError | ConnectionResetError)
    return False
