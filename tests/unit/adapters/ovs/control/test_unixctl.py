"""Which socket of ovs-vswitchd is asked, and what is said when nobody answers there."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from weft.adapters.ovs.control.unixctl import ask_switch
from weft.domain.errors import DatapathFault


def test_a_switch_that_never_ran_is_told_of(tmp_path: Path) -> None:
    with pytest.raises(DatapathFault, match="no control socket"):
        ask_switch(tmp_path, "version")


def test_a_socket_that_goes_while_it_is_looked_for_is_a_fault(tmp_path: Path) -> None:
    """As a switch that is restarted does it; a name that leads nowhere looks the same."""
    (tmp_path / "ovs-vswitchd.1.ctl").symlink_to(tmp_path / "gone")
    with pytest.raises(DatapathFault, match="No such file"):
        ask_switch(tmp_path, "version")


def test_the_newest_socket_is_asked(tmp_path: Path) -> None:
    """Others were left behind by those who have ended."""
    (tmp_path / "ovs-vswitchd.1.ctl").symlink_to(tmp_path / "gone")
    with socket.socket(socket.AF_UNIX) as left, socket.socket(socket.AF_UNIX) as living:
        left.bind(str(tmp_path / "ovs-vswitchd.2.ctl"))
        os.utime(tmp_path / "ovs-vswitchd.2.ctl", (1, 1))
        living.bind(str(tmp_path / "ovs-vswitchd.3.ctl"))
        living.listen()

        def answer() -> None:
            caller, _ = living.accept()
            with caller:
                assert b"version" in caller.recv(1000)
                caller.sendall(b'{"id":0,"result":"3.1","error":null}')

        answering = threading.Thread(target=answer)
        answering.start()
        assert ask_switch(tmp_path, "version") == "3.1"
        answering.join()
