"""Sends one HTTP/1.1 request with `http.client`, under one deadline for the whole exchange.

Import this module only when a request is sent: `http.client` costs 20 ms of CPU, almost a third of a netctl command.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead, RemoteDisconnected
from io import BufferedReader, RawIOBase
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from ssl import SSLContext

    from _typeshed import WriteableBuffer

_HTTP_1_1 = 11


class InvalidReply(ValueError):
    """The server's reply is not HTTP, or is incomplete."""


class Reply(NamedTuple):
    """An HTTP reply: header names in lower case, the body without its transfer encoding."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


class _DeadlineReader(RawIOBase):
    """Reads a socket until a deadline. A socket's own timeout applies to each read, so a slow sender never meets it."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock = sock
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        self._sock.settimeout(_remaining(self._deadline))
        return self._sock.recv_into(buffer)

    def makefile(self, _mode: str) -> BufferedReader:
        """The only method of a socket that `HTTPResponse` calls."""
        return BufferedReader(self)


def exchange(
    method: str,
    target: str,
    *,
    host: str,
    port: int,
    headers: Mapping[str, str],
    body: bytes = b"",
    timeout: float,
    tls: SSLContext | None = None,
) -> Reply:
    """Send a request and read the reply within `timeout` seconds; `OSError` or `InvalidReply` if that fails."""
    deadline = time.monotonic() + timeout
    with closing(HTTPConnection(host, port, timeout=timeout)) as connection:
        connection.connect()
        if tls:
            # Not HTTPSConnection: its handshake would get the whole timeout again.
            connection.sock.settimeout(_remaining(deadline))
            connection.sock = tls.wrap_socket(connection.sock, server_hostname=host)
        connection.sock.settimeout(_remaining(deadline))
        # A server may reject a large body before it has read all of it; its reply says why.
        with suppress(BrokenPipeError, ConnectionResetError):
            # `body or None`: http.client sends Content-Length: 0 for an empty POST or PUT, and none for a GET.
            connection.request(method, target, body=body or None, headers={**headers, "Connection": "close"})
        try:
            return _read_reply(_DeadlineReader(connection.sock, deadline), method)
        except RemoteDisconnected as error:
            raise InvalidReply("the server closed the connection without a reply") from error
        except IncompleteRead as error:
            raise InvalidReply("the reply is truncated") from error
        except HTTPException as error:
            raise InvalidReply("the reply is not HTTP") from error


def _read_reply(reader: _DeadlineReader, method: str) -> Reply:
    with closing(HTTPResponse(cast("socket.socket", reader), method=method)) as response:
        response.begin()
        # http.client takes the end of the stream for the end of the headers, so headers that were cut would make a
        # valid empty reply. HTTP/1.1 servers announce the length or send chunks; `length` is None without either.
        if response.length is None and not response.chunked and response.version >= _HTTP_1_1:
            raise InvalidReply("the reply is truncated, or has no valid length")
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, response.reason, headers, response.read())


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("timed out")
    return remaining
