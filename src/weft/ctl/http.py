"""One HTTP/1.1 exchange by hand (RFC 9112): `http.client` alone would cost a third of the CPU of a whole command.

Every request asks for `Connection: close`, so the answer is all bytes until the end of the stream; whether it is
complete is then judged by its own length or its last chunk.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ssl import SSLContext

_RECEIVE = 256 * 1024


class NotHttp(ValueError):
    """What came back is not a complete HTTP answer."""


class Reply(NamedTuple):
    """An answer: header names in lower case, the body without its transfer encoding."""

    status: int
    reason: str
    headers: Mapping[str, str]
    body: bytes


def encode_request(method: str, target: str, *, headers: Mapping[str, str], body: bytes) -> bytes:
    """The bytes of a request. Headers must not hold line breaks; a body is announced by its length."""
    lines = [f"{method} {target} HTTP/1.1", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body or method in ("POST", "PUT"):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


def decode_reply(data: bytes) -> Reply:
    """The answer held by all bytes of a closed connection, or `NotHttp` when it is cut short or something else."""
    head, blank, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status, _, reason = rest.partition(" ")
    if not (blank and version.startswith("HTTP/1.") and status.isdecimal()):
        raise NotHttp("the connection closed without an answer" if not data else "the answer is not HTTP")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = _join_chunks(body)
    elif "content-length" in headers:
        length = headers["content-length"]
        if not length.isdecimal() or len(body) != int(length):
            raise NotHttp(f"the answer is cut short: {len(body)} of {length} bytes came")
    return Reply(int(status), reason, headers, body)


def exchange(host: str, port: int, *, request: bytes, timeout: float, tls: SSLContext | None) -> bytes:
    """Send the request and read to the end of the stream, all within `timeout` seconds; `OSError` when that fails."""
    deadline = time.monotonic() + timeout
    with socket.create_connection((host, port), timeout=timeout) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.settimeout(_left(deadline))
        with tls.wrap_socket(plain, server_hostname=host) if tls else plain as connection:
            connection.settimeout(_left(deadline))
            # A server may refuse a large body before it has read all of it; what it answered then says why.
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(request)
            received = bytearray()
            while True:
                connection.settimeout(_left(deadline))
                part = connection.recv(_RECEIVE)
                if not part:
                    return bytes(received)
                received += part


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _join_chunks(body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        size = body[at:end].partition(b";")[0].strip() if end >= 0 else b""
        try:
            length = int(size, 16)
        except ValueError as error:
            raise NotHttp("the answer is cut short: its last chunk is missing") from error
        if length == 0:
            return b"".join(parts)
        at = end + 2 + length + 2
        if at > len(body):
            raise NotHttp("the answer is cut short in the middle of a chunk")
        parts.append(body[end + 2 : at - 2])
