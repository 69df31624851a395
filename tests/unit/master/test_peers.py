"""Only root and our own user are believed on the unix socket; plain TCP never is."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from weft.domain.errors import Denied
from weft.master.peers import check_peer


class Peer(socket.socket):
    """A connection whose other end is held by a user of our choice."""

    def __init__(self, family: socket.AddressFamily, uid: int) -> None:
        super().__init__(family)
        self._uid = uid

    def getsockopt(self, level: int, name: int, size: int = 0) -> bytes:  # type: ignore[override]
        assert (level, name) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return struct.pack("3i", 4711, self._uid, 0)


@pytest.mark.parametrize("uid", [0, os.geteuid()])
def test_root_and_our_own_user_are_let_in(uid: int) -> None:
    with Peer(socket.AF_UNIX, uid) as peer:
        check_peer(peer)


def test_another_user_is_not() -> None:
    with Peer(socket.AF_UNIX, os.geteuid() + 1) as peer, pytest.raises(Denied):
        check_peer(peer)


def test_plain_tcp_is_not() -> None:
    with Peer(socket.AF_INET, 0) as peer, pytest.raises(Denied):
        check_peer(peer)
    with pytest.raises(Denied):
        check_peer(None)


def test_a_real_connection_of_ours_is_let_in() -> None:
    one, other = socket.socketpair()
    with one, other:
        check_peer(one)
