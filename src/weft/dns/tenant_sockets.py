"""Opens DNS sockets inside tenant netns: one for UDP and one for TCP, on every address the netns has."""

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
# Room for some thousands of queries while the process is busy.
_RECEIVE_BUFFER = 1 << 20


class Sockets(NamedTuple):
    """Dual-stack sockets: IPv4 clients have v4-mapped addresses. They stay in the netns that they were opened in."""

    udp: socket.socket
    tcp: socket.socket

    def close(self) -> None:
        self.udp.close()
        self.tcp.close()


class TenantNetnsSockets:
    """Opens sockets in the netns that a datapath has pinned in a directory.

    An open socket keeps a netns alive after its name is gone, so the caller closes the sockets before that.
    """

    def __init__(self, directory: Path, *, datapath: str) -> None:
        self._directory = directory
        self._tools = datapath_tools(datapath)

    def identity(self, tenant: TenantName) -> tuple[int, int] | None:
        """Device and inode, which differ for a later netns of the same name; None when there is none."""
        try:
            status = (self._directory / tenant).stat()
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def open(self, tenant: TenantName) -> Sockets:
        """Open both sockets; `NotFound` when the netns is gone."""

        def inside() -> Sockets:
            self._tools.enter_tenant_netns(self._directory, tenant)
            return _open_sockets()

        # setns(2) moves one thread. A thread of its own enters, and ends with the pool: none of ours stays inside.
        with ThreadPoolExecutor(max_workers=1) as thread:
            try:
                return thread.submit(inside).result()
            except OSError as error:
                raise DatapathFault(f"port {DNS_PORT} in the netns of tenant {tenant}: {error.strerror}") from error


def _open_sockets() -> Sockets:
    sockets = Sockets(*(socket.socket(socket.AF_INET6, kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)))
    try:
        for each in sockets:
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sockets.tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets.udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        # The answer must come from the address that was queried: a tenant has a gateway in each network.
        sockets.udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        for each in sockets:
            each.bind(("::", DNS_PORT))
        sockets.tcp.listen(_BACKLOG)
    except OSError:
        sockets.close()
        raise
    return sockets
