"""Sockets inside tenants' spaces: one for UDP and one for TCP, on every address that the tenant has there."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from weft.dns.upstream import DNS_PORT
from weft.domain.errors import DatapathFault
from weft.domain.ids import TenantName
from weft.drivers import datapath_tools

_BACKLOG = 128
# Room for some thousands of questions, should we be busy for a moment.
_RECEIVE_BUFFER = 1 << 20


class Sockets(NamedTuple):
    """Both belong to the space, and may be used from anywhere. They take IPv4 as mapped addresses."""

    udp: socket.socket
    tcp: socket.socket

    def close(self) -> None:
        self.udp.close()
        self.tcp.close()


class Spaces:
    """Tenants' spaces, pinned in a directory by a datapath. A socket keeps its space alive: close it in time."""

    def __init__(self, directory: Path, *, datapath: str) -> None:
        self._directory = directory
        self._tools = datapath_tools(datapath)

    def identity(self, tenant: TenantName) -> tuple[int, int] | None:
        """What tells this space from one that comes after it under the same name; None when there is none."""
        try:
            status = (self._directory / tenant).stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def open_sockets(self, tenant: TenantName) -> Sockets:
        """Open them in there, on a thread that ends with it; `NotFound` when the space is gone."""

        def inside() -> Sockets:
            self._tools.enter(self._directory, tenant)
            return _open_sockets()

        with ThreadPoolExecutor(max_workers=1) as apart:
            try:
                return apart.submit(inside).result()
            except OSError as error:
                raise DatapathFault(f"port {DNS_PORT} in the space of tenant {tenant}: {error.strerror}") from error


def _open_sockets() -> Sockets:
    sockets = Sockets(*(socket.socket(socket.AF_INET6, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)))
    try:
        for each in sockets:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sockets.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets.udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        # The answer must come from the address that was asked: a tenant has a gateway in each network.
        sockets.udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        for each in sockets:
            each.bind(("::", DNS_PORT))
        sockets.tcp.listen(_BACKLOG)
    except OSError:
        sockets.close()
        raise
    return sockets
