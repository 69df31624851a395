"""Unix sockets that only root and our own user can use."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from weft.domain.errors import Denied
from weft.runtime import unix
from weft.runtime.unix import check_caller, listen_privately


def test_the_socket_is_private_from_its_first_moment(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.sock"
    with listen_privately(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert [each.name for each in path.parent.iterdir()] == ["a.sock"]


def test_a_dead_servers_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    listen_privately(path).close()
    with listen_privately(path) as listener, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))
        accepted, _ = listener.accept()
        with accepted:
            check_caller(accepted)


@pytest.mark.parametrize("callers", [0, 1000])
def test_the_socket_of_a_living_server_stays_its_own(tmp_path: Path, callers: int) -> None:
    """A second agent that is started by mistake must not cut the first one off, however many it has to serve."""
    path = tmp_path / "a.sock"
    with listen_privately(path), ExitStack() as stack:
        for _ in range(callers):
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with suppress(BlockingIOError):
                caller.connect(str(path))
        with pytest.raises(OSError, match="another program listens there"):
            listen_privately(path)
        assert [each.name for each in tmp_path.iterdir()] == ["a.sock"]


def test_another_user_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        monkeypatch.setattr(unix, "_CREDENTIALS", _Foreign())
        with pytest.raises(Denied, match="permission denied for uid 1"):
            check_caller(one)


class _Foreign:
    """Credentials of someone else."""

    size = 12

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        return 1, os.geteuid() + 1, 1
