"""Sends packets between network namespaces from this process: sockets are opened inside them and used from here."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
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

# Timeout of one attempt of `eventually_reaches`.
ONE_TRY_S = 2.0
# How long `never_reaches` keeps trying.
QUIET_S = 1.0
# How long `reaches` waits for the first packet. Long, because a busy machine delays packets without losing them.
FIRST_PACKET_S = 10.0

_STREAM_PACE_S = 0.005
_STREAM_BUFFER_BYTES = 1 << 20
# struct tcp_info of linux/tcp.h up to tcpi_total_retrans, its last member here.
_TCP_INFO = struct.Struct("=100xI")
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


class Transport(Enum):
    """The transport protocol of a packet, by its socket type."""

    TCP = socket.SOCK_STREAM
    UDP = socket.SOCK_DGRAM


TCP, UDP = Transport.TCP, Transport.UDP


@dataclass(frozen=True, slots=True)
class NetnsAddress:
    """An address in a network namespace; pods of two tenants may have the same address."""

    namespace: Namespace
    address: IPAddress

    def open_socket(self, transport: Transport) -> socket.socket:
        """A non-blocking socket in the namespace."""
        opened = self.namespace.open_socket(_FAMILIES[self.address.version], transport.value)
        opened.setblocking(False)
        return opened

    def open_client(self, transport: Transport) -> socket.socket:
        """A socket that sends from this address."""
        client = self.open_socket(transport)
        try:
            client.bind((str(self.address), 0))
        except OSError:
            client.close()  # the address was removed
            raise
        return client

    @contextmanager
    def listening(self, port: int, transport: Transport) -> Iterator[socket.socket]:
        """A socket that listens on the address and port."""
        with self.open_socket(transport) as opened:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind((str(self.address), port))
            if transport is TCP:
                opened.listen()
            yield opened


class Streamed(NamedTuple):
    """The numbers of packets of a stream that were sent and that arrived."""

    sent: int
    arrived: int


async def reaches(source: NetnsAddress, target: NetnsAddress, *, port: int, transport: Transport = TCP) -> bool:
    """Whether the first packet from the source arrives at the target with the source's own address; never retries.

    With TCP the handshake must complete and no segment may be retransmitted.
    """
    with target.listening(port, transport) as listener:
        return await _exchange(source, target, listener, port=port, transport=transport, first_packet=True)


async def eventually_reaches(
    source: NetnsAddress, target: NetnsAddress, *, port: int, transport: Transport = TCP
) -> bool:
    """The same, retried until the deadline: for routes and policy that are still on their way to a node."""
    backoff = Backoff(cap=0.5, within=DEADLINE)
    with target.listening(port, transport) as listener:
        while True:
            if await _exchange(source, target, listener, port=port, transport=transport):
                return True
            try:
                await backoff.pause()
            except TimeoutError:
                return False


async def never_reaches(source: NetnsAddress, target: NetnsAddress, *, port: int, transport: Transport = TCP) -> bool:
    """Whether no packet from the source arrives at the target, tried repeatedly for `QUIET_S`."""
    loop = asyncio.get_running_loop()
    with target.listening(port, transport) as listener:
        received = asyncio.ensure_future(_receive(listener, transport))
        try:
            until = loop.time() + QUIET_S
            backoff = Backoff(cap=0.1)
            while loop.time() < until and not received.done():
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(QUIET_S):
                        await _send(source, target, port=port, transport=transport)
                await backoff.pause()
            return not received.done()
        finally:
            received.cancel()
            await asyncio.wait([received])


async def stream(source: NetnsAddress, target: NetnsAddress, *, port: int, stop: asyncio.Event) -> Streamed:
    """Send a datagram every few milliseconds until `stop` is set, and count those that arrive."""
    loop = asyncio.get_running_loop()
    sent = 0
    received: set[bytes] = set()
    with target.listening(port, UDP) as listener, source.open_client(UDP) as client:
        # Room for the datagrams of the time in which a busy machine does not let this process read.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _STREAM_BUFFER_BYTES)
        client.connect((str(target.address), port))
        while not await wait_event(stop, within=_STREAM_PACE_S):
            client.send(b"%d" % sent)
            sent += 1
            with suppress(BlockingIOError):
                received.add(listener.recv(64))
        with suppress(TimeoutError):
            async with asyncio.timeout(ONE_TRY_S):
                while len(received) < sent:
                    received.add(await loop.sock_recv(listener, 64))
    return Streamed(sent=sent, arrived=len(received))


async def _exchange(
    source: NetnsAddress,
    target: NetnsAddress,
    listener: socket.socket,
    *,
    port: int,
    transport: Transport,
    first_packet: bool = False,
) -> bool:
    """One attempt: whether a fresh token arrives from the source's own address."""
    loop = asyncio.get_running_loop()
    # Random, so that a late packet of an earlier attempt, or of another pod with the same address, does not count.
    token = secrets.token_bytes(16)
    destination = (str(target.address), port)
    try:
        async with asyncio.timeout(FIRST_PACKET_S if first_packet else ONE_TRY_S):
            with source.open_client(transport) as client:
                if transport is UDP:
                    await loop.sock_sendto(client, token, destination)
                    data, (host, *_) = await loop.sock_recvfrom(listener, 64)
                    return data == token and host == str(source.address)
                # Concurrently with accept(), because both ends are in this process.
                connecting = asyncio.ensure_future(loop.sock_connect(client, destination))
                try:
                    connection, (host, *_) = await loop.sock_accept(listener)
                    with connection:
                        await connecting
                        await loop.sock_sendall(client, token)
                        arrived = host == str(source.address) and await loop.sock_recv(connection, 64) == token
                        return arrived and not (first_packet and _retransmits(client))
                finally:
                    connecting.cancel()
                    await asyncio.wait([connecting])
                    with suppress(OSError, asyncio.CancelledError):
                        connecting.result()
    except (OSError, TimeoutError):
        return False


def _retransmits(client: socket.socket) -> int:
    """The number of segments that a TCP client has retransmitted, SYNs included."""
    (total,) = _TCP_INFO.unpack(client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    return int(total)


async def _send(source: NetnsAddress, target: NetnsAddress, *, port: int, transport: Transport) -> None:
    loop = asyncio.get_running_loop()
    with source.open_client(transport) as client:
        if transport is UDP:
            await loop.sock_sendto(client, b"?", (str(target.address), port))
        else:
            await loop.sock_connect(client, (str(target.address), port))


async def _receive(listener: socket.socket, transport: Transport) -> None:
    loop = asyncio.get_running_loop()
    if transport is UDP:
        await loop.sock_recv(listener, 64)
    else:
        connection, _ = await loop.sock_accept(listener)
        connection.close()
