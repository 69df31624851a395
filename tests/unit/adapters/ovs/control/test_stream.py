"""The byte stream to a daemon, in a process with very many open files."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from weft.adapters.ovs.control.stream import Stream
from weft.domain.errors import DatapathFault

_MANY = 1100
_ROOM = 200


@pytest.fixture
def many_files() -> Iterator[None]:
    """Open so many files that the next descriptor is above the limit of `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _MANY + _ROOM), hard))
    with ExitStack() as closing:
        closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(_MANY):
            closing.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


def test_a_process_with_many_open_files_can_receive(many_files: None, tmp_path: Path) -> None:
    """An agent has open descriptors for every tenant, client and store."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "daemon.sock"))
        listener.listen()
        stream = Stream(f"unix:{tmp_path / 'daemon.sock'}")
        daemon, _ = listener.accept()
        with daemon:
            assert daemon.fileno() > 1024
            assert stream.receive_available() == b""
            daemon.sendall(b"one")
            assert stream.receive(until=time.monotonic() + 10) == b"one"
            with pytest.raises(DatapathFault, match="no reply"):
                stream.receive(until=time.monotonic() + 0.01)
        with pytest.raises(DatapathFault, match="closed by peer"):
            stream.receive_available()
        stream.close()
