"""Which control socket of ovs-vswitchd is used, and errors if none answers."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from weft.adapters.ovs.control.unixctl import unixctl_call
from weft.domain.errors import DatapathFault


def test_a_missing_control_socket_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(DatapathFault, match="no control socket"):
        unixctl_call(tmp_path, "version")


def test_a_socket_deleted_meanwhile_is_a_fault(tmp_path: Path) -> None:
    """As on a restart. A dangling symlink behaves the same."""
    (tmp_path / "ovs-vswitchd.1.ctl").symlink_to(tmp_path / "gone")
    with pytest.raises(DatapathFault, match="No such file"):
        unixctl_call(tmp_path, "version")


def test_the_newest_socket_is_used(tmp_path: Path) -> None:
    """Crashed processes leave theirs behind."""
    (tmp_path / "ovs-vswitchd.1.ctl").symlink_to(tmp_path / "gone")
    with socket.socket(socket.AF_UNIX) as stale, socket.socket(socket.AF_UNIX) as current:
        stale.bind(str(tmp_path / "ovs-vswitchd.2.ctl"))
        os.utime(tmp_path / "ovs-vswitchd.2.ctl", (1, 1))
        current.bind(str(tmp_path / "ovs-vswitchd.3.ctl"))
        current.listen()

        def serve() -> None:
            connection, _ = current.accept()
            with connection:
                assert b"version" in connection.recv(1000)
                connection.sendall(b'{"id":0,"result":"3.1","error":null}')

        server = threading.Thread(target=serve)
        server.start()
        assert unixctl_call(tmp_path, "version") == "3.1"
        server.join()
