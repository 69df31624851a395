"""Connections the kernel remembers, found by their addresses and forgotten (`nfnetlink_conntrack.h`).

A connection has an original direction and a reply direction; with address translation they differ by more than being
reversed. The kernel sorts out the candidates, so a large table costs little.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable

import msgspec

from weft.adapters.linux import wire
from weft.adapters.linux.netlink import NetlinkSocket
from weft.adapters.linux.wire import AF, Request
from weft.domain.addresses import Address

_SUBSYSTEM = 1
_GET, _DELETE = (_SUBSYSTEM << 8 | number for number in (1, 2))
_HEADER = struct.Struct(">BBH")  # family, version, nothing
_ORIGINAL, _REPLY, _ID, _ZONE, _FILTER = 1, 2, 12, 18, 25
_FILTER_ORIGINAL, _FILTER_REPLY = 1, 2
_ADDRESSES, _PROTOCOL = 1, 2
_SOURCE, _DESTINATION = {4: 1, 6: 3}, {4: 2, 6: 4}
_NUMBER, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 3
_BY_SOURCE, _BY_DESTINATION, _BY_PROTOCOL, _BY_DESTINATION_PORT = 0x1, 0x2, 0x8, 0x20

_GONE = frozenset({errno.ENOENT})
