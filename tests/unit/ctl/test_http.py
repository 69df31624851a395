"""Requests and answers as bytes, whole, cut short, or something else altogether."""

from __future__ import annotations

import socket
import threading

import pytest

from weft.ctl.http import NotHttp, decode_reply, encode_request, exchange


def test_a_request_ends_its_connection_and_announces_its_body() -> None:
    assert encode_request("PUT", "/a", headers={"Host": "h"}, body=b"{}") == (
        b"PUT /a HTTP/1.1\r\nConnection: close\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
    )


def test_an_empty_post_still_announces_its_length() -> None:
    assert b"Content-Length: 0\r\n" in encode_request("POST", "/a", headers={}, body=b"")
    assert b"Content-Length" not in encode_request("GET", "/a", headers={}, body=b"")


def test_a_reply_with_a_length() -> None:
    reply = decode_reply(b"HTTP/1.1 404 Not Found\r\nETag: 7\r\ncontent-length: 2\r\n\r\n{}")
    assert (reply.status, reply.reason, reply.body) == (404, "Not Found", b"{}")
    assert reply.headers["etag"] == "7"


def test_a_reply_in_chunks() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = decode_reply(head + b"3\r\nabc\r\nA;note=1\r\n0123456789\r\n0\r\n\r\n")
    assert reply.body == b"abc0123456789"


def test_a_reply_that_ends_with_its_connection() -> None:
    assert decode_reply(b"HTTP/1.0 200 OK\r\n\r\nall of it").body == b"all of it"


@pytest.mark.parametrize(
    "data",
    [
        b"",
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
def test_what_is_not_a_whole_answer_is_never_taken_for_one(data: bytes) -> None:
    with pytest.raises(NotHttp):
        decode_reply(data)


def test_an_early_refusal_of_a_large_body_is_still_read() -> None:
    """A server may answer 413 and stop reading; its answer counts, not the broken pipe."""
    answer = b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass

        thread = threading.Thread(target=refuse)
        thread.start()
        host, port = server.getsockname()
        received = exchange(host, port, request=b"x" * 4_000_000, timeout=60, tls=None)
        thread.join()
    assert decode_reply(received).status == 413


def test_a_silent_server_meets_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(TimeoutError):
        host, port = server.getsockname()
        exchange(host, port, request=b"GET / HTTP/1.1\r\n\r\n", timeout=0.1, tls=None)


def test_a_server_that_dribbles_meets_the_deadline_too() -> None:
    """The deadline is for the whole exchange, not for each read."""
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def dribble() -> None:
            connection, _ = server.accept()
            with connection:
                while not stop.wait(0.02):
                    connection.sendall(b"x")

        thread = threading.Thread(target=dribble)
        thread.start()
        host, port = server.getsockname()
        try:
            with pytest.raises(TimeoutError):
                exchange(host, port, request=b"GET / HTTP/1.1\r\n\r\n", timeout=0.3, tls=None)
        finally:
            stop.set()
            thread.join()
