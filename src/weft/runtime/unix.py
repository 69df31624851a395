"""Unix sockets for root and our own user alone."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

from weft.domain.errors import Denied

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_BACKLOG = 512


def listen_privately(path: Path) -> socket.socket:
    """A socket that is never open to others, also not for a moment.

    It takes the place of a dead server's; an `OSError` when one that lives is there.
    """
    if _is_served(path):
        raise OSError(errno.EADDRINUSE, "another program serves there", str(path))
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    newborn = path.with_name(f".{os.getpid()}")  # short, for the kernel takes only 107 bytes
    newborn.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.bind(str(newborn))
        newborn.chmod(0o600)
        listener.listen(_BACKLOG)
        newborn.rename(path)
    except OSError:
        listener.close()
        raise
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(str(path))
        except BlockingIOError:  # it has more callers than it can take in
            return True
        except OSError:
            return False
    return True


def check_caller(peer: socket.socket) -> None:
    """`Denied` unless root or our own user is at the other end of a unix socket."""
    _, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in {0, os.geteuid()}:
        raise Denied(f"user {uid} may not come in here")
