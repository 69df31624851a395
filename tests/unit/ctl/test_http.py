"""One HTTP exchange: complete, truncated, slow and foreign replies."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from weft.ctl.http import InvalidReply, Reply, exchange


@contextmanager
def serving(handle: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """A server that handles one connection on a thread; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def run() -> None:
            connection, _ = server.accept()
            with connection:
                handle(connection)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            thread.join()


def send(address: tuple[str, int], method: str = "GET", *, body: bytes = b"", timeout: float = 60.0) -> Reply:
    host, port = address
    return exchange(method, "/a", host=host, port=port, headers={"X-Test": "1"}, body=body, timeout=timeout)


def reply_to(data: bytes) -> Reply:
    """The reply that a client reads from these bytes of a connection that is closed then."""

    def handle(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(data)

    with serving(handle) as address:
        return send(address)


def request_of(method: str, body: bytes) -> bytes:
    """The bytes of a request."""
    received = bytearray()

    def handle(connection: socket.socket) -> None:
        # Headers and body may arrive in separate segments.
        while not received.endswith(b"\r\n\r\n" + body):
            received.extend(connection.recv(65536))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with serving(handle) as address:
        send(address, method, body=body)
    return bytes(received)


def test_a_request_closes_its_connection_and_announces_its_body() -> None:
    head, _, body = request_of("PUT", b"{}").partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"PUT /a HTTP/1.1"
    assert {b"Connection: close", b"X-Test: 1", b"Content-Length: 2"} <= {*lines}
    assert any(line.startswith(b"Host: 127.0.0.1:") for line in lines)
    assert body == b"{}"


def test_an_empty_post_announces_its_length_and_a_get_does_not() -> None:
    assert b"Content-Length: 0\r\n" in request_of("POST", b"")
    assert b"Content-Length" not in request_of("GET", b"")


def test_a_reply_with_a_length() -> None:
    reply = reply_to(b"HTTP/1.1 404 Not Found\r\nETag: 7\r\ncontent-length: 2\r\n\r\n{}")
    assert (reply.status, reply.reason, reply.body) == (404, "Not Found", b"{}")
    assert reply.headers["etag"] == "7"


def test_a_reply_in_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = reply_to(head + b"3\r\nabc\r\nA;note=1\r\n0123456789\r\n0\r\n\r\n")
    assert reply.body == b"abc0123456789"


def test_a_reply_of_http_1_0_may_end_with_its_connection() -> None:
    assert reply_to(b"HTTP/1.0 200 OK\r\n\r\nall of it").body == b"all of it"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
    ],
)
def test_an_incomplete_reply_is_never_taken_for_a_complete_one(data: bytes) -> None:
    with pytest.raises(InvalidReply):
        reply_to(data)


def test_an_early_rejection_of_a_large_body_is_read() -> None:
    """A server may reply 413 and stop reading; its reply counts, not the broken pipe."""

    def reject(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass

    with serving(reject) as address:
        assert send(address, "PUT", body=b"x" * 4_000_000).status == 413


def test_a_server_that_never_replies_meets_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        send(server.getsockname(), timeout=0.1)


@pytest.mark.parametrize("piece", [b"x", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_a_server_that_sends_slowly_meets_the_deadline_too(piece: bytes) -> None:
    """The deadline is for the whole exchange, not for each read."""
    stop = threading.Event()

    def trickle(connection: socket.socket) -> None:
        while not stop.wait(0.02):
            connection.sendall(piece)

    with serving(trickle) as address:
        try:
            with pytest.raises(TimeoutError):
                send(address, timeout=0.3)
        finally:
            stop.set()
