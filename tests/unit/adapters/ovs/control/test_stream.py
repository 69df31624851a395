"""A byte stream to a daemon, in a process that has very many files open."""

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
    """So many files are open that the next has a number beyond what `select` takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, _MANY + _ROOM), hard))
    with ExitStack() as closing:
        closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(_MANY):
            closing.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


def test_a_process_with_many_files_hears_its_switch(many_files: None, tmp_path: Path) -> None:
    """A node has a file open for every tenant, store and caller."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "daemon.sock"))
        listener.listen()
        stream = Stream(f"unix:{tmp_path / 'daemon.sock'}")
        daemon, _ = listener.accept()
        with daemon:
            assert daemon.fileno() > 1024
            assert stream.receive_waiting() == b""
            daemon.sendall(b"one")
            assert stream.receive(until=time.monotonic() + 10) == b"one"
            with pytest.raises(DatapathFault, match="no answer"):
                stream.receive(until=time.monotonic() + 0.01)
        with pytest.raises(DatapathFault, match="ended"):
            stream.receive_waiting()
        stream.close()
