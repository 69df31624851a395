"""One echo request of an exact size that routers must not cut (RFC 792, RFC 4443): does a full packet get through?"""

from __future__ import annotations

import os
import socket
import struct
import time
from ipaddress import ip_address

_PROBE = 3  # IP_PMTUDISC_PROBE: never cut, and do not believe what was remembered of the path
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
_V4_HEADER, _V6_HEADER, _ICMP_HEADER = 20, 40, 8
_REQUEST = {4: 8, 6: 128}
_REPLY = {4: 0, 6: 129}
_RECEIVE = 65_536


def answers(target: str, *, size: int, source: str, within: float) -> bool:
    """Whether a packet of this size, IP header included, is answered. `OSError` when it cannot even leave.

    Needs the right to open raw sockets.
    """
    version = ip_address(target).version
    family, protocol = (
        (socket.AF_INET, socket.IPPROTO_ICMP) if version == 4 else (socket.AF_INET6, socket.IPPROTO_ICMPV6)
    )
    deadline = time.monotonic() + within
    mark = os.urandom(4)
    with socket.socket(family, socket.SOCK_RAW, protocol) as raw:
        if version == 4:
            raw.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _PROBE)
        else:
            raw.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PROBE)
        raw.bind((source, 0))
        raw.sendto(_request(version, mark, size), (target, 0))
        while (left := deadline - time.monotonic()) > 0:
            raw.settimeout(left)
            try:
                data, _ = raw.recvfrom(_RECEIVE)
            except TimeoutError:
                return False
            message = data[(data[0] & 0x0F) * 4 :] if version == 4 else data
            if message[:1] == bytes([_REPLY[version]]) and message[4:_ICMP_HEADER] == mark:
                return True
    return False


def _request(version: int, mark: bytes, size: int) -> bytes:
    header = _V4_HEADER if version == 4 else _V6_HEADER
    body = bytes(max(size - header - _ICMP_HEADER, 0))
    unsigned = struct.pack("!BBH", _REQUEST[version], 0, 0) + mark + body
    if version == 6:
        return unsigned  # the kernel puts the checksum in
    return unsigned[:2] + struct.pack("!H", checksum(unsigned)) + unsigned[4:]


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
