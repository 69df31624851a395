"""Backends of services in the lab: each pod replies with its own name, so a client learns which backend it got."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from weft.lab.hosts import Pod
from weft.lab.traffic import ONE_TRY_S, TCP, UDP, IPAddress, NetnsAddress, Transport
from weft.runtime.tasks import background

# Instead of a name: no reply came in time.
NO_ANSWER = ""
# Instead of a name: the connection was refused (RST or ICMP unreachable).
REFUSED = "refused"


@asynccontextmanager
async def serving_names(
    pods: Iterable[Pod], *, port: int, transport: Transport = TCP, family: int = 4
) -> AsyncIterator[None]:
    """Inside the block each pod replies with its name on the port of its address of the family."""
    async with AsyncExitStack() as stack:
        for pod in pods:
            listener = stack.enter_context(pod.place(family).listening(port, transport))
            await stack.enter_async_context(
                background(_serve(pod.name.encode(), listener, transport), name=f"backend {pod.name}")
            )
        yield


async def _serve(name: bytes, listener: socket.socket, transport: Transport) -> None:
    loop = asyncio.get_running_loop()
    while True:
        if transport is UDP:
            _, source = await loop.sock_recvfrom(listener, 64)
            await loop.sock_sendto(listener, name, source)
        else:
            # The name is sent unasked: a client that only connects learns it too.
            connection, _ = await loop.sock_accept(listener)
            with connection, suppress(ConnectionError):
                await loop.sock_sendall(connection, name)


async def query_backend(client: NetnsAddress, address: IPAddress, *, port: int, transport: Transport = TCP) -> str:
    """The name of the backend that replies at an address. Tries once, with a new socket: a new connection."""
    loop = asyncio.get_running_loop()
    with client.open_client(transport) as connection:
        try:
            async with asyncio.timeout(ONE_TRY_S):
                await loop.sock_connect(connection, (str(address), port))
                if transport is UDP:
                    await loop.sock_sendall(connection, b"?")
                return (await loop.sock_recv(connection, 64)).decode()
        except ConnectionRefusedError:
            return REFUSED
        except (OSError, TimeoutError):
            return NO_ANSWER
