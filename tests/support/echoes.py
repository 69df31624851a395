"""Echo requests and their answers, of both families, by raw sockets in any namespace."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct

from weft.kernel.netns import Namespace
from weft.lab.traffic import Place

ECHO = {4: 8, 6: 128}
_ECHO_REPLY = {4: 0, 6: 129}
_ICMP = {4: (socket.AF_INET, socket.IPPROTO_ICMP), 6: (socket.AF_INET6, socket.IPPROTO_ICMPV6)}
_HEADER = struct.Struct(">BBHHH")
# How long somebody may take who will perhaps never answer.
_PATIENCE_S = 2.0


def open_echoes(namespace: Namespace, family: int) -> socket.socket:
    """A socket that hears and says ICMP of a family, and never blocks."""
    kind, protocol = _ICMP[family]
    opened = namespace.open_socket(kind, socket.SOCK_RAW, protocol)
    opened.setblocking(False)
    return opened


async def ping(source: Place, target: str) -> None:
    """Return when the target has answered."""
    loop, family = asyncio.get_running_loop(), source.address.version
    word = secrets.token_bytes(16)
    with open_echoes(source.namespace, family) as caller:
        caller.bind((str(source.address), 0))
        await loop.sock_sendto(caller, _echo_request(word, family), (target, 0))
        while True:
            heard = icmp_of(await loop.sock_recv(caller, 128), family)
            if heard[0] == _ECHO_REPLY[family] and heard.endswith(word):
                return


async def is_answered(source: Place, target: str) -> bool:
    """Whether the target answers, before one loses patience."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await ping(source, target)
    except (TimeoutError, OSError):
        return False
    return True


def _echo_request(word: bytes, family: int) -> bytes:
    """With a checksum for v4; for v6 the kernel makes it."""
    blank = _HEADER.pack(ECHO[family], 0, 0, 1, 1) + word
    if family == 6:
        return blank
    total = sum(number for (number,) in struct.iter_unpack(">H", blank))
    total = (total & 0xFFFF) + (total >> 16)
    return blank[:2] + struct.pack(">H", ~(total + (total >> 16)) & 0xFFFF) + blank[4:]


def icmp_of(data: bytes, family: int) -> bytes:
    """What a raw socket gave, without the header that comes with it in v4."""
    return data[(data[0] & 0x0F) * 4 :] if family == 4 else data
