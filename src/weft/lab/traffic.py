"""Packets between namespaces, sent and received by this process: sockets are opened inside, and used from here."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from weft.kernel.netns import Namespace
from weft.lab.waiting import DEADLINE
from weft.runtime.backoff import Backoff, wait_event

IPAddress = IPv4Address | IPv6Address

# How long one packet or handshake may take before it is tried again.
ONE_TRY_S = 2.0
# For how long it is tried in vain before something counts as unreachable.
QUIET_S = 1.0

_STREAM_PACE_S = 0.005
_EAR_BYTES = 1 << 20
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


class Transport(Enum):
    """What carries the question."""

    TCP = socket.SOCK_STREAM
    UDP = socket.SOCK_DGRAM


TCP, UDP = Transport.TCP, Transport.UDP


@dataclass(frozen=True, slots=True)
class Place:
    """An address in a namespace: two pods of different tenants may have the same one, and be different places."""

    namespace: Namespace
    address: IPAddress

    def open_socket(self, transport: Transport) -> socket.socket:
        """A socket inside that never blocks."""
        opened = self.namespace.open_socket(_FAMILIES[self.address.version], transport.value)
        opened.setblocking(False)
        return opened

    def open_caller(self, transport: Transport) -> socket.socket:
        """A socket that speaks with this very address."""
        caller = self.open_socket(transport)
        try:
            caller.bind((str(self.address), 0))
        except OSError:
            caller.close()  # the address has left meanwhile
            raise
        return caller

    @contextmanager
    def listening(self, port: int, transport: Transport) -> Iterator[socket.socket]:
        """A socket that receives what comes for the address and port."""
        with self.open_socket(transport) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((str(self.address), port))
            if transport is TCP:
                opened.listen()
            yield opened


class Streamed(NamedTuple):
    """How many packets of a stream were sent, and how many arrived."""

    sent: int
    arrived: int


async def reaches(source: Place, target: Place, *, port: int, transport: Transport = TCP) -> bool:
    """Whether a question from the source comes to the target itself, from the source's own address, and is answered."""
    backoff = Backoff(cap=0.5, within=DEADLINE)
    with target.listening(port, transport) as listener:
        while True:
            if await _asks(source, target, listener, port=port, transport=transport):
                return True
            try:
                await backoff.pause()
            except TimeoutError:
                return False


async def never_reaches(source: Place, target: Place, *, port: int, transport: Transport = TCP) -> bool:
    """Whether nothing from the source comes to the target, however often it is tried for a while."""
    loop = asyncio.get_running_loop()
    with target.listening(port, transport) as listener:
        heard = asyncio.ensure_future(_hear(listener, transport))
        try:
            until = loop.time() + QUIET_S
            backoff = Backoff(cap=0.1)
            while loop.time() < until and not heard.done():
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(QUIET_S):
                        await _call(source, target, port=port, transport=transport)
                await backoff.pause()
            return not heard.done()
        finally:
            heard.cancel()
            await asyncio.wait([heard])


async def stream(source: Place, target: Place, *, port: int, stop: asyncio.Event) -> Streamed:
    """Send a packet every few milliseconds until told to stop, and count those that arrive."""
    loop = asyncio.get_running_loop()
    sent = 0
    heard: set[bytes] = set()
    with target.listening(port, UDP) as ear, source.open_caller(UDP) as mouth:
        ear.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _EAR_BYTES)
        mouth.connect((str(target.address), port))
        while not await wait_event(stop, within=_STREAM_PACE_S):
            mouth.send(b"%d" % sent)
            sent += 1
            with suppress(BlockingIOError):
                heard.add(ear.recv(64))
        with suppress(TimeoutError):
            async with asyncio.timeout(ONE_TRY_S):
                while len(heard) < sent:
                    heard.add(await loop.sock_recv(ear, 64))
    return Streamed(sent=sent, arrived=len(heard))


async def _asks(source: Place, target: Place, listener: socket.socket, *, port: int, transport: Transport) -> bool:
    """One try."""
    loop = asyncio.get_running_loop()
    question = secrets.token_bytes(16)
    try:
        async with asyncio.timeout(ONE_TRY_S):
            with source.open_caller(transport) as caller:
                if transport is UDP:
                    await loop.sock_sendto(caller, question, (str(target.address), port))
                    heard, (host, *_) = await loop.sock_recvfrom(listener, 64)
                    return heard == question and host == str(source.address)
                connecting = asyncio.ensure_future(loop.sock_connect(caller, (str(target.address), port)))
                try:
                    connection, (host, *_) = await loop.sock_accept(listener)
                    with connection:
                        await connecting
                        await loop.sock_sendall(caller, question)
                        return host == str(source.address) and await loop.sock_recv(connection, 64) == question
                finally:
                    connecting.cancel()
                    await asyncio.wait([connecting])
                    with suppress(OSError, asyncio.CancelledError):
                        connecting.result()
    except (OSError, TimeoutError):
        return False


async def _call(source: Place, target: Place, *, port: int, transport: Transport) -> None:
    loop = asyncio.get_running_loop()
    with source.open_caller(transport) as caller:
        if transport is UDP:
            await loop.sock_sendto(caller, b"?", (str(target.address), port))
        else:
            await loop.sock_connect(caller, (str(target.address), port))


async def _hear(listener: socket.socket, transport: Transport) -> None:
    loop = asyncio.get_running_loop()
    if transport is UDP:
        await loop.sock_recv(listener, 64)
    else:
        connection, _ = await loop.sock_accept(listener)
        connection.close()
