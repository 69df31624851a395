"""Path MTU probe: an ICMP echo request of an exact size that must not be fragmented (RFC 792, RFC 4443)."""

from __future__ import annotations

import os
import socket
import struct
import time
from ipaddress import ip_address

# linux/in.h. IP_PMTUDISC_PROBE sets DF and ignores the cached path MTU, which could be outdated.
_IP_PMTUDISC_PROBE = 3
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
_V4_HEADER, _V6_HEADER, _ICMP_HEADER = 20, 40, 8
# ICMP and ICMPv6 types, by IP version.
_ECHO_REQUEST = {4: 8, 6: 128}
_ECHO_REPLY = {4: 0, 6: 129}
_RECEIVE_BYTES = 65_536


def answers(target: str, *, size: int, source: str, within: float) -> bool:
    """Whether an echo request of this size, IP header included, is answered. `OSError` if it cannot be sent.

    Needs CAP_NET_RAW.
    """
    version = ip_address(target).version
    family, protocol = (
        (socket.AF_INET, socket.IPPROTO_ICMP) if version == 4 else (socket.AF_INET6, socket.IPPROTO_ICMPV6)
    )
    deadline = time.monotonic() + within
    # In place of identifier and sequence number: a raw socket receives the replies to every ping of the host.
    identifier = os.urandom(4)
    with socket.socket(family, socket.SOCK_RAW, protocol) as raw:
        if version == 4:
            raw.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        else:
            raw.setsockopt(socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _IP_PMTUDISC_PROBE)
        raw.bind((source, 0))
        raw.sendto(_request(version, identifier, size), (target, 0))
        while (remaining := deadline - time.monotonic()) > 0:
            raw.settimeout(remaining)
            try:
                data, _ = raw.recvfrom(_RECEIVE_BYTES)
            except TimeoutError:
                return False
            # IPv4 raw sockets deliver the IP header too, IPv6 ones do not.
            message = data[(data[0] & 0x0F) * 4 :] if version == 4 else data
            if message[:1] == bytes([_ECHO_REPLY[version]]) and message[4:_ICMP_HEADER] == identifier:
                return True
    return False


def _request(version: int, identifier: bytes, size: int) -> bytes:
    header = _V4_HEADER if version == 4 else _V6_HEADER
    body = bytes(max(size - header - _ICMP_HEADER, 0))
    unsigned = struct.pack("!BBH", _ECHO_REQUEST[version], 0, 0) + identifier + body
    if version == 6:
        return unsigned  # the kernel computes the ICMPv6 checksum
    return unsigned[:2] + struct.pack("!H", checksum(unsigned)) + unsigned[4:]


def checksum(data: bytes) -> int:
    """The Internet checksum (RFC 1071)."""
    padded = data + b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(padded) // 2}H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
