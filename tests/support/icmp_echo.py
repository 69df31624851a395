"""ICMP and ICMPv6 echo from raw sockets in any namespace."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct

from weft.kernel.netns import Namespace
from weft.lab.traffic import NetnsAddress

ECHO = {4: 8, 6: 128}
_ECHO_REPLY = {4: 0, 6: 129}
_ICMP = {4: (socket.AF_INET, socket.IPPROTO_ICMP), 6: (socket.AF_INET6, socket.IPPROTO_ICMPV6)}
_HEADER = struct.Struct(">BBHHH")
# Timeout of a ping that may be unanswered.
_PATIENCE_S = 2.0


def open_icmp_socket(namespace: Namespace, family: int) -> socket.socket:
    """A non-blocking raw ICMP socket of a family."""
    kind, protocol = _ICMP[family]
    opened = namespace.open_socket(kind, socket.SOCK_RAW, protocol)
    opened.setblocking(False)
    return opened


async def ping(source: NetnsAddress, target: str) -> None:
    """Send an echo request and return when its reply arrives."""
    loop, family = asyncio.get_running_loop(), source.address.version
    nonce = secrets.token_bytes(16)
    with open_icmp_socket(source.namespace, family) as sender:
        sender.bind((str(source.address), 0))
        await loop.sock_sendto(sender, _echo_request(nonce, family), (target, 0))
        while True:
            message = icmp_message(await loop.sock_recv(sender, 128), family)
            if message[0] == _ECHO_REPLY[family] and message.endswith(nonce):
                return


async def is_answered(source: NetnsAddress, target: str) -> bool:
    """Whether the target answers in time."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await ping(source, target)
    except (TimeoutError, OSError):
        return False
    return True


def _echo_request(nonce: bytes, family: int) -> bytes:
    """An echo request; for ICMPv6 the kernel computes the checksum."""
    blank = _HEADER.pack(ECHO[family], 0, 0, 1, 1) + nonce
    if family == 6:
        return blank
    total = sum(number for (number,) in struct.iter_unpack(">H", blank))
    total = (total & 0xFFFF) + (total >> 16)
    return blank[:2] + struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF) + blank[4:]


def icmp_message(data: bytes, family: int) -> bytes:
    """The ICMP message from a raw socket, without the header that IPv4 sockets include."""
    return data[(data[0] & 0x0F) * 4 :] if family == 4 else data
