"""Packets that a `log group` rule tells of (`include/uapi/linux/netfilter/nfnetlink_log.h`).

The kernel gathers what it tells for a moment, and one socket in a namespace hears a group. Nobody waits for a packet
here: the reader comes when it likes, and what did not fit into its socket meanwhile is lost.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.socket import NETFILTER, NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.packet_headers import Packet, parse_packet

_SUBSYSTEM = 4
_PACKET, _CONFIG = (_SUBSYSTEM << 8 | number for number in (0, 1))
_HEADER = struct.Struct(">BBH")  # family, version, group
_MARK, _TIME, _INPUT, _OUTPUT, _INPUT_PORT, _OUTPUT_PORT, _PAYLOAD = 2, 3, 4, 5, 6, 7, 9
_TIMESTAMP = struct.Struct(">QQ")  # seconds, microseconds
_COMMAND, _MODE, _GATHERING = 1, 2, 4
_BIND = 1
_COPY = struct.Struct(">IBx")  # bytes, mode
_COPY_PACKET = 2
_COPIED_BYTES = 128
_GATHERING_TIME = 2  # hundredths of a second


class LoggedPacket(NamedTuple):
    """A packet, its mark, the indexes of the devices it came and leaves by (0: none), and when it was seen.

    Of what passes a bridge these are the bridge's ports.
    """

    packet: Packet
    mark: int
    in_iface: int
    out_iface: int
    at: float


class PacketLog:
    """Hears a group of a namespace from now on."""

    def __init__(self, group: int, *, namespace: Namespace) -> None:
        """`Refused` when somebody else hears the group already."""
        self._netlink = NetlinkSocket(NETFILTER, namespace=namespace)
        header = _HEADER.pack(codec.AF_UNSPEC, 0, group)
        settings = (
            codec.u8(_COMMAND, _BIND),
            codec.attribute(_MODE, _COPY.pack(_COPIED_BYTES, _COPY_PACKET)),
            codec.be32(_GATHERING, _GATHERING_TIME),
        )
        try:
            self._netlink.send_batch(
                [Request(_CONFIG, 0, header + setting, "listen to packet log group", group) for setting in settings]
            )
        except BaseException:
            self._netlink.close()
            raise

    def read(self, *, most: int) -> Iterator[LoggedPacket]:
        """What has come since the last reading, from at most so many datagrams."""
        for message in self._netlink.read_unasked(most=most):
            if message.kind == _PACKET:
                yield parse_told(message.payload)

    def close(self) -> None:
        self._netlink.close()


def parse_told(payload: bytes) -> LoggedPacket:
    """A packet out of the kernel's message."""
    codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    return LoggedPacket(
        packet=parse_packet(found.get(_PAYLOAD, b"")),
        mark=codec.to_big_number(found.get(_MARK)),
        in_iface=codec.to_big_number(found.get(_INPUT_PORT) or found.get(_INPUT)),
        out_iface=codec.to_big_number(found.get(_OUTPUT_PORT) or found.get(_OUTPUT)),
        at=_to_time(found.get(_TIME)),
    )


def _to_time(data: bytes | None) -> float:
    """The kernel does not always say; then it was a moment ago."""
    if data is None:
        return time.time()
    seconds, microseconds = codec.unpack_header(_TIMESTAMP, data)
    return seconds + microseconds / 1e6
