"""NFLOG: read the packets that nft rules log with `log group` (`linux/netfilter/nfnetlink_log.h`).

One socket per network namespace binds a group. The reader polls; packets that do not fit into its receive buffer
meanwhile are lost.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from weft.kernel.netlink import codec
from weft.kernel.netlink.codec import Request
from weft.kernel.netlink.socket import NetlinkSocket
from weft.kernel.netns import Namespace
from weft.kernel.packet_headers import Packet, parse_packet
from weft.kernel.uapi.netlink import NETLINK_NETFILTER
from weft.kernel.uapi.nflog import (
    NFNL_SUBSYS_ULOG,
    NFULA_CFG_CMD,
    NFULA_CFG_MODE,
    NFULA_CFG_TIMEOUT,
    NFULA_IFINDEX_INDEV,
    NFULA_IFINDEX_OUTDEV,
    NFULA_IFINDEX_PHYSINDEV,
    NFULA_IFINDEX_PHYSOUTDEV,
    NFULA_MARK,
    NFULA_PAYLOAD,
    NFULA_TIMESTAMP,
    NFULNL_CFG_CMD_BIND,
    NFULNL_COPY_PACKET,
    NFULNL_MSG_CONFIG,
    NFULNL_MSG_PACKET,
)

_LOG_PACKET = NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_PACKET
_LOG_CONFIG = NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_CONFIG
_HEADER = struct.Struct(">BBH")  # struct nfgenmsg: family, version, group
_TIMESTAMP = struct.Struct(">QQ")  # seconds, microseconds
_COPY = struct.Struct(">IBx")  # bytes, mode
# Enough for IPv6, some extension headers and ports.
_COPIED_BYTES = 128
_FLUSH_TIMEOUT = 2  # hundredths of a second: how long the kernel batches packets


class LoggedPacket(NamedTuple):
    """A logged packet: headers, mark, input and output ifindex (0: none) and time.

    For bridged packets the interfaces are the bridge ports.
    """

    packet: Packet
    mark: int
    in_iface: int
    out_iface: int
    at: float


class PacketLog:
    """A bound NFLOG group of one network namespace."""

    def __init__(self, group: int, *, namespace: Namespace) -> None:
        """Bind the group; `NetlinkError` when another socket has bound it."""
        self._netlink = NetlinkSocket(NETLINK_NETFILTER, namespace=namespace)
        header = _HEADER.pack(codec.AF_UNSPEC, 0, group)
        settings = (
            codec.u8(NFULA_CFG_CMD, NFULNL_CFG_CMD_BIND),
            codec.attribute(NFULA_CFG_MODE, _COPY.pack(_COPIED_BYTES, NFULNL_COPY_PACKET)),
            codec.be32(NFULA_CFG_TIMEOUT, _FLUSH_TIMEOUT),
        )
        try:
            self._netlink.send_batch(
                [Request(_LOG_CONFIG, 0, header + setting, "bind nflog group", group) for setting in settings]
            )
        except BaseException:
            self._netlink.close()
            raise

    def read(self, *, most: int) -> Iterator[LoggedPacket]:
        """Read packets logged since the last call, from at most `most` datagrams."""
        for message in self._netlink.read_notifications(most=most):
            if message.kind == _LOG_PACKET:
                yield parse_logged_packet(message.payload)

    def close(self) -> None:
        self._netlink.close()


def parse_logged_packet(payload: bytes) -> LoggedPacket:
    """Decode an NFULNL_MSG_PACKET message."""
    codec.unpack_header(_HEADER, payload)
    found = codec.attributes(payload, _HEADER.size)
    return LoggedPacket(
        packet=parse_packet(found.get(NFULA_PAYLOAD, b"")),
        mark=codec.to_int_be(found.get(NFULA_MARK)),
        in_iface=codec.to_int_be(found.get(NFULA_IFINDEX_PHYSINDEV) or found.get(NFULA_IFINDEX_INDEV)),
        out_iface=codec.to_int_be(found.get(NFULA_IFINDEX_PHYSOUTDEV) or found.get(NFULA_IFINDEX_OUTDEV)),
        at=_to_time(found.get(NFULA_TIMESTAMP)),
    )


def _to_time(data: bytes | None) -> float:
    """Decode NFULA_TIMESTAMP. The kernel omits it for packets without a receive timestamp; then take the clock."""
    if data is None:
        return time.time()
    seconds, microseconds = codec.unpack_header(_TIMESTAMP, data)
    return seconds + microseconds / 1e6
