"""Services of the lab: pods that say their names to whoever asks, and who is heard at an address."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from weft.lab.hosts import Pod
from weft.lab.traffic import ONE_TRY_S, TCP, UDP, IPAddress, Place, Transport
from weft.runtime.tasks import background

# Who is heard when nobody answers.
NOBODY = ""
# Who is heard when the network says that nobody will.
REFUSED = "refused"


@asynccontextmanager
async def saying_names(
    pods: Iterable[Pod], *, port: int, transport: Transport = TCP, family: int = 4
) -> AsyncIterator[None]:
    """Each pod tells its name to whoever asks at the port of its address of the family."""
    async with AsyncExitStack() as stack:
        for pod in pods:
            ear = stack.enter_context(pod.place(family).listening(port, transport))
            await stack.enter_async_context(
                background(_say(pod.name.encode(), ear, transport), name=f"ear of {pod.name}")
            )
        yield


async def _say(name: bytes, ear: socket.socket, transport: Transport) -> None:
    loop = asyncio.get_running_loop()
    while True:
        if transport is UDP:
            _, source = await loop.sock_recvfrom(ear, 64)
            await loop.sock_sendto(ear, name, source)
        else:
            connection, _ = await loop.sock_accept(ear)
            with connection, suppress(ConnectionError):
                await loop.sock_sendall(connection, name)


async def hears(client: Place, address: IPAddress, *, port: int, transport: Transport = TCP) -> str:
    """The name that is heard at an address by a client that asks once, from a socket of its own."""
    loop = asyncio.get_running_loop()
    with client.open_caller(transport) as caller:
        try:
            async with asyncio.timeout(ONE_TRY_S):
                await loop.sock_connect(caller, (str(address), port))
                if transport is UDP:
                    await loop.sock_sendall(caller, b"?")
                return (await loop.sock_recv(caller, 64)).decode()
        except ConnectionRefusedError:
            return REFUSED
        except (OSError, TimeoutError):
            return NOBODY
