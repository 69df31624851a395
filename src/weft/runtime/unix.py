"""Unix sockets that only root and our own user can use."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

from weft.domain.errors import Denied

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
# A node may start hundreds of pods at once.
_BACKLOG = 512


def listen_privately(path: Path) -> socket.socket:
    """Listen on a socket that is never accessible to other users, not even for a moment.

    Replaces the socket of a dead server; `OSError` if a server listens there.
    """
    if _has_listener(path):
        raise OSError(errno.EADDRINUSE, "another program listens there", str(path))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{os.getpid()}")  # sun_path has room for 107 bytes only
    temporary.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(temporary))
        temporary.chmod(0o600)  # before listen(): until then no client can connect
        listener.listen(_BACKLOG)
        # Atomic: clients see the old socket or the new one, never none.
        temporary.rename(path)
    except OSError:
        listener.close()
        raise
    return listener


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.setblocking(False)
        try:
            client.connect(str(path))
        except BlockingIOError:  # its backlog is full, so there is a server
            return True
        except OSError:
            return False
    return True


def check_caller(peer: socket.socket) -> None:
    """`Denied` unless the peer of a unix socket is root or our own user (SO_PEERCRED)."""
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in {0, os.geteuid()}:
        raise Denied(f"permission denied for uid {uid}")
