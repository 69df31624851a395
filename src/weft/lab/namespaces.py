"""Namespaces for a process or a thread: what it makes in them is seen by nobody else, and gone with it.

For a whole process that holds whatever ends it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft.domain.errors import DatapathFault
from weft.kernel.netlink.link import LOOPBACK, alter_link
from weft.kernel.netlink.socket import ROUTE, NetlinkSocket
from weft.kernel.netns import CLONE_NEWNET, Namespace

CLONE_FS, CLONE_NEWNS = 0x00000200, 0x00020000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 1 << 18

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_LIBC.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_MNT_DETACH = 2


def step_apart() -> None:
    """Move the calling thread, and all it starts from now on, into network and mount namespaces of its own."""
    unshare(CLONE_NEWNET | CLONE_NEWNS)
    mount(None, Path("/"), flags=MS_REC | MS_PRIVATE)
    raise_loopback()


@contextmanager
def stepped_apart() -> Iterator[None]:
    """The same while the block runs; the thread comes back afterwards, and all that was made is gone."""
    directory = Path.cwd()
    with ExitStack() as back:
        for kind in ("net", "mnt"):
            fd = os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
            back.callback(os.close, fd)
            back.callback(_return_to, fd)
        step_apart()
        yield
    os.chdir(directory)  # entering a mount namespace leads to its root


def _return_to(fd: int) -> None:
    unshare(CLONE_FS)  # the kernel lets nobody change mounts who shares a working directory with another thread
    _check(_LIBC.setns(fd, 0), "come back")


def raise_loopback() -> None:
    """Bring up loopback in the calling thread's namespace."""
    with Namespace.current() as here, NetlinkSocket(ROUTE, namespace=here) as netlink:
        netlink.send_batch([alter_link(LOOPBACK, up=True)])


def unshare(flags: int) -> None:
    """Leave what is shared with other threads, by the kernel's flags."""
    _check(_LIBC.unshare(flags), "unshare")


def enter(namespace: Path) -> None:
    """Move the calling thread into the network namespace at a path."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_LIBC.setns(fd, CLONE_NEWNET), f"enter {namespace}")
    finally:
        os.close(fd)


def mount(source: Path | None, target: Path, *, flags: int = 0, kind: str | None = None) -> None:
    """Mount something in the calling thread's mount namespace."""
    _check(
        _LIBC.mount(
            None if source is None else os.fsencode(source),
            os.fsencode(target),
            None if kind is None else kind.encode(),
            flags,
            None,
        ),
        f"mount on {target}",
    )


def unmount(target: Path) -> None:
    """Take a mount away, whoever still uses it."""
    _check(_LIBC.umount2(os.fsencode(target), _MNT_DETACH), f"unmount {target}")


def _check(result: int, doing: str) -> None:
    if result != 0:
        raise DatapathFault(f"{doing}: {os.strerror(ctypes.get_errno())}")
