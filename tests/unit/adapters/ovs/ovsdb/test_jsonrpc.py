"""JSON-RPC messages decoded from a stream, however it is segmented."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.adapters.ovs.ovsdb.client import Database
from weft.adapters.ovs.ovsdb.jsonrpc import Incoming, Message, encode
from weft.domain.errors import DatapathFault

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=5), st.lists(st.integers(1, 50), max_size=20), st.sampled_from(["", " ", "\n"]))
def test_messages_survive_any_segmentation(values: list[Any], cuts: list[int], between: str) -> None:
    stream = between.encode().join(encode({"id": 1, "result": value, "more": {}}) for value in values)
    incoming, found, at = Incoming(), list[Message](), 0
    for cut in [*cuts, len(stream)]:
        found += incoming.feed(stream[at : at + cut])
        at += cut
    assert [message.result for message in found] == values


@given(st.binary(max_size=200))
def test_random_bytes_are_buffered_or_rejected(noise: bytes) -> None:
    try:
        Incoming().feed(noise + b"}")
    except DatapathFault as fault:
        assert fault.message.startswith("ovsdb: ")


@pytest.mark.parametrize("stream", [b"[]}", b'{"id":1}{"params":3}', b'{"method":1}{}'])
def test_invalid_messages_are_rejected(stream: bytes) -> None:
    with pytest.raises(DatapathFault, match="ovsdb"):
        Incoming().feed(stream)


def test_echo_requests_are_answered(tmp_path: Path) -> None:
    """Even while a reply is awaited: otherwise the server closes the connection."""
    received: list[Any] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "db.sock"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                answers: tuple[dict[str, Any], ...] = ({"tables": {}}, {})
                for answer in answers:
                    request = json.loads(connection.recv(1 << 16))
                    connection.sendall(encode({"method": "echo", "params": ["alive?"], "id": "echo"}))
                    received.append(json.loads(connection.recv(1 << 16)))
                    connection.sendall(encode({"id": request["id"], "result": answer, "error": None}))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        database = Database(f"unix:{tmp_path / 'db.sock'}", columns={})
        database.poll()
        database.close()
        thread.join(10)
    assert received == [{"id": "echo", "result": ["alive?"], "error": None}] * 2


def test_a_failed_handshake_does_not_count_as_a_connection(tmp_path: Path) -> None:
    """W28: a server that is not ready is tried again; an empty copy must not pass for the database."""
    row = {"new": {"name": "weft"}}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "db.sock"))
        listener.listen()

        def serve() -> None:
            schema: dict[str, Any] = {"tables": {"Bridge": {"columns": {"name": {}}}}}
            for answers in ([None], [None], [schema, {"Bridge": {"u": row}}]):
                connection, _ = listener.accept()
                with connection:
                    for answer in answers:
                        request = json.loads(connection.recv(1 << 16))
                        error = "not ready" if answer is None else None
                        connection.sendall(encode({"id": request["id"], "result": answer, "error": error}))
                    connection.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        database = Database(f"unix:{tmp_path / 'db.sock'}", columns={"Bridge": ["name"]})
        for _ in range(2):
            with pytest.raises(DatapathFault, match="not ready"):
                database.poll()
            assert database.connect_count == 0
        database.poll()
        assert (database.connect_count, database.tables["Bridge"]) == (1, {"u": row["new"]})
        database.close()
        thread.join(10)
